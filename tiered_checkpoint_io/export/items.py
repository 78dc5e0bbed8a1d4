"""Tensors of a sharded checkpoint, streamed from their items into a mapped file, a few megabytes at a time."""

from __future__ import annotations

import io
import math
import mmap
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from fsspec.spec import AbstractBufferedFile
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError, UsageError
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.model.manifest import METADATA

#: Bytes that are read and written at once.
_WINDOW = 32 << 20
_READ_AHEAD = 64 << 10

#: Reads bytes of a block of elements, as if they lay contiguous: from where on, and how many.
_Read = Callable[[int, int], memoryview]


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

    def copy(self, name: str, target: mmap.mmap, base: int) -> None:
        """See :meth:`Items.copy`."""
        ...


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
        """An object that is no tensor.

        Raises:
            CorruptCheckpointError: It is not where ``.metadata`` says.
            RestoreError: It holds classes that are not allowed.
        """
        path, offset, length = self._place(MetadataIndex(name))
        data = self._folder.read(path, offset, length)
        try:
            return Trust(weights_only).load(io.BytesIO(data), map_location="cpu")
        except Exception as error:
            raise RestoreError(
                f"torch.load refused {name!r}: {error}",
                operation="load",
                tier="durable",
                key=self._folder.where,
                hint="if it holds objects of yours and you trust it, set weights_only to false",
            ) from error

    def copy(self, name: str, target: mmap.mmap, base: int) -> None:
        """Writes a tensor's elements, contiguous, into a mapped file, from byte ``base`` on.

        Raises:
            CorruptCheckpointError: What is stored is not what ``.metadata`` says.
            UsageError: The items were transformed by an extension of DCP.
        """
        entry = self.tensors[name]
        size, dtype = tuple(entry.size), entry.properties.dtype
        if not math.prod(size):
            return
        whole = np.frombuffer(target, np.uint8, self.nbytes(name), base).reshape(*size, dtype.itemsize)
        covered = 0
        for chunk in entry.chunks:
            sizes = tuple(chunk.sizes)
            bounds = zip(chunk.offsets, sizes, size, strict=False)
            block = whole[tuple(slice(low, low + count) for low, count, _ in bounds)]
            if block.shape[:-1] != sizes or min(chunk.offsets, default=0) < 0:
                raise self._corrupt(f"a chunk of {name!r} lies outside of it")
            covered += math.prod(sizes)
            if math.prod(sizes):
                read = self._elements(name, MetadataIndex(name, chunk.offsets), sizes, dtype)
                # Written pages count as the process's own for no longer than that.
                _copy(read, 0, block, lambda: target.madvise(mmap.MADV_DONTNEED))
        if covered != math.prod(size):
            raise self._corrupt(f"the chunks of {name!r} hold {covered} of its {math.prod(size)} elements")

    # ------------------------------------------------------------------------------------- inside
    def _elements(self, name: str, index: MetadataIndex, sizes: tuple[int, ...], dtype: torch.dtype) -> _Read:
        path, offset, length = self._place(index)
        if length > _WINDOW:
            with FakeTensorMode():
                # Reads the item's directory and its pickle, but no elements.
                found: Any = self._load(name, _Item(self._folder, path, offset, length), sizes, dtype)
                data_offset = getattr(found.untyped_storage(), "_checkpoint_offset", None)
                at = found.storage_offset() * dtype.itemsize
            if data_offset is not None and found.is_contiguous():
                begin = offset + int(data_offset) + at
                return lambda start, count: self._folder.read(path, begin + start, count)
        found = self._load(name, io.BytesIO(self._folder.read(path, offset, length)), sizes, dtype)
        data = memoryview(found.contiguous().reshape(-1).view(torch.uint8).numpy())
        return lambda start, count: data[start : start + count]

    def _load(self, name: str, file: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
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


def _copy(read: _Read, start: int, block: NDArray[np.uint8], written: Callable[[], object]) -> None:
    """Fills a block of an array, a window at a time; its first byte is at ``start`` of what ``read`` gives."""
    row = math.prod(block.shape[1:])
    if block.ndim > 2 and row > _WINDOW:
        for number, inner in enumerate(block):
            _copy(read, start + number * row, inner, written)
        return
    rows = max(1, _WINDOW // row)
    for first in range(0, len(block), rows):
        piece = block[first : first + rows]
        piece[...] = np.frombuffer(read(start + first * row, piece.nbytes), np.uint8).reshape(piece.shape)
        written()
