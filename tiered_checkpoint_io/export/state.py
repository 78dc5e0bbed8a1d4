"""Tensors of a full checkpoint's file, by the names that torch.distributed.checkpoint would give them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from tiered_checkpoint_io.errors import ExportError, RestoreError

#: Bytes that are written at once.
_WINDOW = 32 << 20


class State:
    """The tensors of a file that torch.save wrote, mapped: what is not written yet takes no memory."""

    def __init__(self, file: Path, where: str, *, weights_only: bool) -> None:
        """Loads the file; ``where`` it came from is for errors.

        Raises:
            RestoreError: torch.load refuses it, because of classes that are not allowed or an old format.
            ExportError: It holds no dictionary.
        """
        try:
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)
        except Exception as error:
            raise RestoreError(
                f"torch.load refused the file: {error}",
                operation="load",
                tier="durable",
                key=where,
                hint="if it holds objects of yours and you trust it, set weights_only to false (--trust)",
            ) from error
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

    def copy(self, name: str, target: mmap.mmap, base: int) -> None:
        """Writes a tensor's elements, contiguous, into a mapped file, from byte ``base`` on.

        Raises:
            ExportError: It is sparse.
        """
        tensor: Any = self._tensors[name]
        if tensor.layout != torch.strided:
            raise ExportError(
                f"{name!r} is sparse",
                operation="export",
                key=self.where,
                hint="export to a torch file, or choose other tensors by prefix",
            )
        elements = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(elements), _WINDOW):
            piece = elements[start : start + _WINDOW]
            target[base + start : base + start + len(piece)] = piece
            # Written pages count as the process's own for no longer than that.
            target.madvise(mmap.MADV_DONTNEED)
