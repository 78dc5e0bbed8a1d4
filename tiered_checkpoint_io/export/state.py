"""Tensors of a full checkpoint's file, by the names that torch.distributed.checkpoint would give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from tiered_checkpoint_io.errors import ExportError
from tiered_checkpoint_io.export.blocks import Read, TargetBlock, pour, whole
from tiered_checkpoint_io.export.items import loaded


class MappedState:
    """The tensors of a file that torch.save wrote, mapped: what is not written yet takes no memory."""

    def __init__(self, file: Path, where: str, *, weights_only: bool) -> None:
        """Loads the file; ``where`` it came from is for errors.

        Raises:
            RestoreError: torch.load refuses it, because of classes that are not allowed or an old format.
            ExportError: It holds no dictionary.
        """
        state = loaded(file, "the file", where, weights_only=weights_only, mmap=True)
        if not isinstance(state, dict):
            raise ExportError(
                f"the file holds a {type(state).__name__}, no dictionary", operation="export", tier="durable", key=where
            )
        flat, _ = flatten_state_dict(state)
        self.where = where
        self._tensors = {name: value.detach() for name, value in flat.items() if isinstance(value, torch.Tensor)}
        self.tensors = {
            name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [])
            for name, tensor in self._tensors.items()
        }

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor's elements."""
        tensor = self._tensors[name]
        return tensor.numel() * tensor.dtype.itemsize

    def fill(self, targets: Mapping[str, Sequence[TargetBlock]]) -> None:
        """Copies blocks of tensors, by their names, into mapped files.

        Raises:
            ExportError: One is sparse.
        """
        for name, wanted in targets.items():
            tensor: Any = self._tensors[name]
            if tensor.layout != torch.strided:
                raise ExportError(
                    f"{name!r} is sparse",
                    operation="export",
                    key=self.where,
                    hint="export to a torch file, or choose other tensors by prefix",
                )
            if not tensor.numel():
                continue
            elements = memoryview(
                tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
            )
            pour(
                whole(tensor.size()),
                tensor.dtype.itemsize,
                _reader(elements),
                wanted,
            )


def _reader(elements: memoryview) -> Read:
    return lambda start, count: elements[start : start + count]
