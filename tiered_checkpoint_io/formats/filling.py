"""How a planned file is put together in a buffer: copied in parallel, and hashed on the way or later."""

from __future__ import annotations

import bisect
import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import xxhash

from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model.hashing import chunk_ranges, chunk_size_for

#: Copied and then hashed at once: small enough that what was just written is still in the cache of
#: the core that hashes it, large enough that the interpreter's cost for a piece does not show.
_PIECE = 512 << 10
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of the file that are no tensor's: the pickle, and the zip file's own structure."""

    offset: int
    data: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def cut(self, start: int, nbytes: int, offset: int) -> Segment:
        """Its bytes from ``start`` on, for another place."""
        return Segment(offset, self.data[start : start + nbytes])


@dataclass(frozen=True, slots=True)
class StorageRegion:
    """Where in the file bytes of a storage belong: ``nbytes`` of them, from byte ``start`` on."""

    offset: int
    nbytes: int
    storage: torch.UntypedStorage
    start: int = 0

    def cut(self, start: int, nbytes: int, offset: int) -> StorageRegion:
        """Its bytes from ``start`` on, for another place."""
        return StorageRegion(offset, nbytes, self.storage, self.start + start)


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """Where in the file the elements of a tensor belong that lie scattered in their storage."""

    #: A multiple of the elements' size.
    offset: int
    nbytes: int
    tensor: torch.Tensor
    #: How the elements lie in the file.
    stride: tuple[int, ...]

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    def gathered(self) -> StorageRegion:
        """The same bytes, copied to a storage of their own."""
        with torch.no_grad():
            target = torch.empty(self.nbytes // self.tensor.element_size(), dtype=self.tensor.dtype)
            target.as_strided(self.tensor.shape, self.stride).copy_(self.tensor)
        return StorageRegion(self.offset, self.nbytes, target.untyped_storage())


Region = StorageRegion | TensorRegion


class Sliced(Protocol):
    """A ``memoryview``, or what gives its bytes in pieces as one does."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> AbstractContextManager[memoryview]: ...


def default_threads() -> int:
    """How many threads copy by default: the node's cores, shared with the other local ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MAX_THREADS, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


@dataclass(slots=True)
class _Source:
    """A stretch of the file, and where its bytes come from."""

    offset: int
    nbytes: int
    #: Copied from this address; or from ``data``; or, with neither, by a device, see ``wait``.
    address: int | None = None
    data: memoryview | None = None
    #: Returns once a device has written the stretch.
    wait: Callable[[], None] | None = None


class Filling:
    """One filling of a buffer: which threads share the chunks of the file."""

    def __init__(self, view: memoryview, segments: tuple[Segment, ...], *, hashed: bool = True) -> None:
        self._view = view
        self._hashed = hashed
        self._anchor = (ctypes.c_char * len(view)).from_buffer(view)
        self._base = ctypes.addressof(self._anchor)
        self._sources = [_Source(segment.offset, len(segment.data), data=segment.data) for segment in segments]
        self._ends: list[int] = []

    def run(self, regions: tuple[Region, ...], threads: int) -> tuple[str, ...]:
        """Copies everything; gives the hashes of the chunks, or nothing where they are made later.

        When it returns, no copy is under way, and no reference to the buffer is left.
        """
        try:
            for region in regions:
                # Begins the copies from devices.
                self._sources.append(self._source(region))
            self._sources.sort(key=lambda source: source.offset)
            self._ends = [source.offset + source.nbytes for source in self._sources]
            chunks = chunk_ranges(len(self._view), chunk_size_for(len(self._view)))
            digests = in_parallel(self._fill_chunk, chunks, threads)
            return tuple(digests) if self._hashed else ()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            for source in self._sources:
                if source.wait is not None:
                    source.wait()
        finally:
            self._sources.clear()
            del self._anchor
            self._view.release()

    def _fill_chunk(self, chunk: tuple[int, int]) -> str:
        """Copies one chunk, and hashes it.

        What is hashed is the destination: it holds the skeleton and many small tensors as one
        run of bytes, and it is what a reader will see. Hashing the source instead saves a twentieth
        of the time for large tensors, and cannot be done for those on a device.
        """
        start, length = chunk
        hasher = xxhash.xxh3_128()
        index = bisect.bisect_right(self._ends, start)
        sources, view, base = self._sources, self._view, self._base
        size = _PIECE if self._hashed else length
        for piece in range(start, start + length, size):
            end = min(piece + size, start + length)
            while index < len(sources) and (source := sources[index]).offset < end:
                low = max(source.offset, piece)
                high = min(source.offset + source.nbytes, end)
                if source.address is not None:
                    # Lets go of the interpreter lock, unlike a copy between memoryviews.
                    ctypes.memmove(base + low, source.address + low - source.offset, high - low)
                elif source.data is not None:
                    view[low:high] = source.data[low - source.offset : high - source.offset]
                elif source.wait is not None:
                    source.wait()
                if source.offset + source.nbytes > end:
                    break
                index += 1
            if self._hashed:
                hasher.update(view[piece:end])
        return hasher.hexdigest()

    def _source(self, region: Region) -> _Source:
        if isinstance(region, TensorRegion):
            return self._gather(region)
        storage = region.storage
        if storage.nbytes() < region.start + region.nbytes:
            raise UsageError(
                "a tensor was resized between planning and capturing a checkpoint",
                operation="capture",
                hint="do not change the state while it is being saved",
            )
        if storage.device.type == "cpu":
            return _Source(region.offset, region.nbytes, address=storage.data_ptr() + region.start)
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(cast("Any", storage))
            content = whole[region.start : region.start + region.nbytes]
            target = torch.frombuffer(self._view, dtype=torch.uint8, offset=region.offset, count=region.nbytes)
            if storage.device.type == "cuda":
                # On the current stream, and so behind whatever still computes the tensor. Copies
                # of all regions are queued at once; chunks are hashed while later ones run.
                with torch.cuda.device(storage.device):
                    target.copy_(content, non_blocking=True)
                    done = cast("Any", torch.cuda).Event()
                    done.record()
                return _Source(region.offset, region.nbytes, wait=done.synchronize)
            target.copy_(content)
        return _Source(region.offset, region.nbytes)

    def _gather(self, region: TensorRegion) -> _Source:
        tensor = region.tensor
        with torch.no_grad():
            target = torch.frombuffer(
                self._view, dtype=tensor.dtype, offset=region.offset, count=region.nbytes // tensor.element_size()
            )
            target.as_strided(tensor.shape, region.stride).copy_(tensor)
        return _Source(region.offset, region.nbytes)


def hash_chunks(content: Sliced, threads: int) -> tuple[str, ...]:
    """The hashes of a file's chunks, as :meth:`Filling.run` gives them."""

    def hash_chunk(chunk: tuple[int, int]) -> str:
        start, length = chunk
        hasher = xxhash.xxh3_128()
        with content[start : start + length] as data:
            # Lets go of the interpreter lock, which training needs meanwhile.
            hasher.update(data)
        return hasher.hexdigest()

    return tuple(in_parallel(hash_chunk, chunk_ranges(len(content), chunk_size_for(len(content))), threads))
