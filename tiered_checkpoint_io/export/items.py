"""Tensors of a sharded checkpoint, streamed from their items into a file, a few megabytes at a time."""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fsspec.spec import AbstractBufferedFile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError, UsageError
from tiered_checkpoint_io.export.folder import Folder

#: Bytes that are read, or mapped for writing, at once.
_WINDOW = 32 << 20
_READ_AHEAD = 64 << 10


class Items:
    """What a sharded checkpoint holds, by its fully qualified names."""

    def __init__(self, folder: Folder, metadata: Metadata) -> None:
        self._folder = folder
        self._places = metadata.storage_data or {}
        #: By name; what are not tensors are objects that torch.save wrote.
        self.entries = metadata.state_dict_metadata
        #: The path of each name in the nested state; None where the state was flat.
        self.paths: dict[str, tuple[str | int, ...]] | None = metadata.planner_data or None

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """What is known of a tensor; None where the name is another object's."""
        entry = self.entries[name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def value(self, name: str, *, weights_only: bool) -> Any:
        """An object that is no tensor.

        Raises:
            CorruptCheckpointError: It is not where ``.metadata`` says.
            RestoreError: It holds classes that are not allowed.
        """
        path, offset, length = self._place(MetadataIndex(name))
        data = self._folder.read(path, offset, length)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except Exception as error:
            raise RestoreError(
                f"torch.load refused {name!r}: {error}",
                operation="load",
                tier="durable",
                key=self._folder.where,
                hint="if it holds objects of yours and you trust it, set weights_only to false",
            ) from error

    def copy(self, name: str, target: int, base: int) -> None:
        """Writes a tensor's elements, contiguous, into a file.

        Args:
            name: Of the tensor.
            target: Descriptor of the file, open for reading and writing, and large enough.
            base: Where in it the elements begin.

        Raises:
            CorruptCheckpointError: What is stored is not what ``.metadata`` says.
            UsageError: The items were transformed by an extension of DCP.
        """
        entry = self.tensor(name)
        assert entry is not None
        size = tuple(entry.size)
        covered = 0
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if len(sizes) != len(size) or any(
                low < 0 or count < 0 or low + count > whole
                for low, count, whole in zip(offsets, sizes, size, strict=True)
            ):
                raise self._corrupt(f"a chunk of {name!r} lies outside of it")
            covered += math.prod(sizes)
            if math.prod(sizes):
                read = self._elements(name, MetadataIndex(name, chunk.offsets), sizes, entry.properties.dtype)
                _copy_block(read, 0, sizes, offsets, size, entry.properties.dtype.itemsize, target, base)
        if covered != math.prod(size):
            raise self._corrupt(f"the chunks of {name!r} hold {covered} of its {math.prod(size)} elements")

    # ------------------------------------------------------------------------------------- inside
    def _elements(
        self, name: str, index: MetadataIndex, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Callable[[int, int], memoryview]:
        """Reads bytes of a chunk's elements, as if they lay contiguous."""
        path, offset, length = self._place(index)
        if length > _WINDOW:
            with FakeTensorMode():
                # Reads the item's directory and its pickle, but no elements.
                found: Any = self._load(name, _Item(self._folder, path, offset, length))
                data_offset = getattr(found.untyped_storage(), "_checkpoint_offset", None)
                at = found.storage_offset() * dtype.itemsize
            self._check(name, found, sizes, dtype)
            if data_offset is not None and found.is_contiguous():
                begin = offset + int(data_offset) + at
                return lambda start, count: self._folder.read(path, begin + start, count)
        found = self._load(name, io.BytesIO(self._folder.read(path, offset, length)))
        self._check(name, found, sizes, dtype)
        data = memoryview(found.contiguous().reshape(-1).view(torch.uint8).numpy())
        return lambda start, count: data[start : start + count]

    def _load(self, name: str, file: Any) -> torch.Tensor:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except CorruptCheckpointError:
            raise
        except Exception as error:
            raise self._corrupt(f"the item of {name!r} can't be read: {error}") from error
        if not isinstance(found, torch.Tensor):
            raise self._corrupt(f"the item of {name!r} is no tensor")
        return found

    def _check(self, name: str, found: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(found.size()) != sizes or found.dtype != dtype:
            raise self._corrupt(
                f"the item of {name!r} has shape {tuple(found.size())}, {found.dtype}; expected {sizes}, {dtype}"
            )

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


def _copy_block(
    read: Callable[[int, int], memoryview],
    start: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    whole: Sequence[int],
    itemsize: int,
    target: int,
    base: int,
) -> None:
    """Copies a block of ``sizes`` at ``offsets`` of an array of shape ``whole``, which begins at ``base``.

    ``read`` gives bytes of the block itself; its first is at ``start``.
    """
    if not sizes:
        sizes, offsets, whole = (1,), (0,), (1,)
    from_row, to_row = math.prod(sizes[1:]) * itemsize, math.prod(whole[1:]) * itemsize
    base += offsets[0] * to_row
    if to_row > _WINDOW and len(sizes) > 1:
        for row in range(sizes[0]):
            _copy_block(
                read, start + row * from_row, sizes[1:], offsets[1:], whole[1:], itemsize, target, base + row * to_row
            )
        return
    step = max(1, _WINDOW // to_row)
    for row in range(0, sizes[0], step):
        count = min(step, sizes[0] - row)
        data = read(start + row * from_row, count * from_row)
        _scatter(
            data, (count, *sizes[1:]), (0, *offsets[1:]), (count, *whole[1:]), itemsize, target, base + row * to_row
        )


def _scatter(
    data: memoryview,
    sizes: Sequence[int],
    offsets: Sequence[int],
    whole: Sequence[int],
    itemsize: int,
    target: int,
    base: int,
) -> None:
    # A mapping for as long as this takes: its pages count as resident no longer than that.
    skipped = base % mmap.ALLOCATIONGRANULARITY
    length = math.prod(whole) * itemsize
    # A mapped page without space would end the process when it is touched.
    os.posix_fallocate(target, base, length)
    with mmap.mmap(target, skipped + length, offset=base - skipped) as mapping:
        window = np.frombuffer(mapping, dtype=np.uint8, offset=skipped, count=length).reshape(*whole, itemsize)
        place = tuple(slice(low, low + count) for low, count in zip(offsets, sizes, strict=True))
        window[place] = np.frombuffer(data, dtype=np.uint8).reshape(*sizes, itemsize)
        # The mapping can't be closed while an array refers to it.
        del window
