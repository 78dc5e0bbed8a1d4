"""Tensors of a sharded checkpoint, streamed from their items into mapped files, a few megabytes at a time."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from fsspec.spec import AbstractBufferedFile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError, UsageError
from tiered_checkpoint_io.export import blocks
from tiered_checkpoint_io.export.blocks import Box, Read, TargetBlock
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.formats.shard_image import skeleton_of
from tiered_checkpoint_io.model.manifest import METADATA

_READ_AHEAD = 64 << 10
#: Files that are read at once, each from its front to its end.
_READERS = 3
#: FakeTensorMode is of the process.
_faking = threading.Lock()


class Tensors(Protocol):
    """Tensors to be written into files: what they are, and a way to copy their elements."""

    @property
    def where(self) -> str:
        """Where they come from, for errors."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Shape and element type of each, by its name."""
        ...

    def nbytes(self, name: str) -> int:
        """See :meth:`Items.nbytes`."""
        ...

    def fill(self, targets: Mapping[str, Sequence[TargetBlock]]) -> None:
        """See :meth:`Items.fill`."""
        ...


def loaded(file: Any, what: str, where: str, *, weights_only: bool, mmap: bool = False) -> Any:
    """What torch.load gives; ``what`` the file is, and ``where`` it came from, are for errors.

    Raises:
        RestoreError: torch.load refuses it, because of classes that are not allowed or an old format.
    """
    try:
        return Trust(weights_only).load(file, map_location="cpu", mmap=mmap)
    except Exception as error:
        raise RestoreError(
            f"torch.load refused {what}: {error}",
            operation="load",
            tier="durable",
            key=where,
            hint="if it holds objects of yours and you trust it, set weights_only to false (--trust)",
        ) from error


class Items:
    """What a folder of torch.distributed.checkpoint holds, by its fully qualified names."""

    def __init__(self, folder: Folder) -> None:
        """Reads ``.metadata``.

        Raises:
            CheckpointNotFoundError: There is none.
            CorruptCheckpointError: It is damaged.
        """
        data = folder.read(METADATA, 0, folder.size(METADATA))
        metadata = parse_metadata(data, tier="durable", where=f"{folder.where}/{METADATA}")
        self._folder = folder
        self.where = folder.where
        self._places = metadata.storage_data or {}
        #: By name; what are not tensors are objects that torch.save wrote.
        self.entries = metadata.state_dict_metadata
        self.tensors = {name: entry for name, entry in self.entries.items() if isinstance(entry, TensorStorageMetadata)}
        #: The path of each name in the nested state; None where the state was flat.
        self.paths: dict[str, tuple[str | int, ...]] | None = metadata.planner_data or None

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor's elements."""
        entry = self.tensors[name]
        return math.prod(entry.size) * entry.properties.dtype.itemsize

    def value(self, name: str, *, weights_only: bool) -> Any:
        """Loads an object that is no tensor.

        Raises:
            CorruptCheckpointError: It is not where ``.metadata`` says.
            RestoreError: As :func:`loaded`.
        """
        saved = io.BytesIO(self._folder.read(*self._place(MetadataIndex(name))))
        return loaded(saved, repr(name), self.where, weights_only=weights_only)

    def fill(self, targets: Mapping[str, Sequence[TargetBlock]]) -> None:
        """Copies blocks of tensors, by their names, into mapped files.

        Each file is read once, from its front to its end, whatever the order of the targets.

        Args:
            targets: Where the blocks belong.

        Raises:
            CorruptCheckpointError: What is stored is not what ``.metadata`` says.
            UsageError: The items were transformed by an extension of DCP.
        """
        todo: dict[str, list[tuple[int, str, Box]]] = {}
        for name in targets:
            for box in self._boxes(name):
                if any(box.common(target.box) for target in targets[name]):
                    path, offset, _ = self._place(MetadataIndex(name, torch.Size(box.offsets)))
                    todo.setdefault(path, []).append((offset, name, box))

        def one(path: str) -> None:
            for _, name, box in sorted(todo[path]):
                dtype = self.tensors[name].properties.dtype
                read = self._elements(name, MetadataIndex(name, torch.Size(box.offsets)), box.sizes, dtype)
                blocks.pour(box, dtype.itemsize, read, targets[name])

        in_parallel(one, todo, _READERS)

    # ------------------------------------------------------------------------------------- inside
    def _boxes(self, name: str) -> list[Box]:
        """The blocks that are stored of a tensor; together they are all of it."""
        entry = self.tensors[name]
        outer = blocks.whole(entry.size)
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        boxes = [box for box in boxes if box.numel]
        for box in boxes:
            if len(box.sizes) != len(outer.sizes) or box.common(outer) != box:
                raise self._corrupt(f"a chunk of {name!r} lies outside of it")
        covered = sum(box.numel for box in boxes)
        if covered != outer.numel:
            raise self._corrupt(f"the chunks of {name!r} hold {covered} of its {outer.numel} elements")
        return boxes

    def _elements(self, name: str, index: MetadataIndex, sizes: tuple[int, ...], dtype: torch.dtype) -> Read:
        path, offset, length = self._place(index)
        known = skeleton_of(dtype, sizes)
        if length == known.length and self._folder.read(path, offset, known.data_offset) == known.head:
            # The file of a tensor as torch.save lays it out: nothing in it has to be looked up.
            return lambda start, count: self._folder.read(path, offset + known.data_offset + start, count)
        if length > blocks.WINDOW:
            with _faking, FakeTensorMode():
                # Reads the item's directory and its pickle, but no elements.
                found: Any = self._load(name, _Item(self._folder, path, offset, length), sizes, dtype)
                data_offset = getattr(found.untyped_storage(), "_checkpoint_offset", None)
                at = found.storage_offset() * dtype.itemsize
            # Of a conjugate or negative view, the file holds the elements before that.
            if data_offset is not None and found.is_contiguous() and not (found.is_conj() or found.is_neg()):
                begin = offset + int(data_offset) + at
                return lambda start, count: self._folder.read(path, begin + start, count)
        found = self._load(name, io.BytesIO(self._folder.read(path, offset, length)), sizes, dtype)
        plain: Any = found.resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = memoryview(plain.view(torch.uint8).numpy())
        return lambda start, count: data[start : start + count]

    def _load(self, name: str, file: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            found = Trust(weights_only=True).load(file, map_location="cpu")
        except CorruptCheckpointError:
            raise
        except Exception as error:
            raise self._corrupt(f"the item of {name!r} can't be read: {error}") from error
        if not isinstance(found, torch.Tensor):
            raise self._corrupt(f"the item of {name!r} is no tensor")
        if tuple(found.size()) != sizes or found.dtype != dtype:
            raise self._corrupt(
                f"the item of {name!r} has shape {tuple(found.size())}, {found.dtype}; expected {sizes}, {dtype}"
            )
        return found

    def _place(self, index: MetadataIndex) -> tuple[str, int, int]:
        info = self._places.get(index)
        if info is None:
            raise self._corrupt(f"{index.fqn!r} at {index.offset} lies in no file")
        if getattr(info, "transform_descriptors", None):
            raise UsageError(
                f"{index.fqn!r} was transformed by {info.transform_descriptors}",
                operation="export",
                key=self._folder.where,
                hint="load it by torch.distributed.checkpoint with the same extensions",
            )
        return info.relative_path, info.offset, info.length

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, operation="load", tier="durable", key=self._folder.where)


class _Item(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """An item as a file of its own, read ahead a little."""

    def __init__(self, folder: Folder, path: str, offset: int, length: int) -> None:
        self._folder, self._offset = folder, offset
        super().__init__(None, path, block_size=_READ_AHEAD, size=length)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self._folder.read(self.path, self._offset + start, end - start))
