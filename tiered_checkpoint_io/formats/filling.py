"""How a planned file is put together in a buffer: copied in parallel, and hashed on the way or later."""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import xxhash

from tiered_checkpoint_io.model.hashing import chunk_ranges, chunk_size_for

#: Copied and then hashed at once: small enough that what was just written is still in the cache of
#: the core that hashes it, large enough that the interpreter's cost for a piece does not show.
_PIECE = 512 << 10
#: Copied at once from a device that has no asynchronous copies.
_DEVICE_PIECE = 64 << 20
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

    @property
    def shrunk(self) -> bool:
        """Whether the storage has become too small since the file was planned."""
        return self.storage.nbytes() < self.start + self.nbytes

    def cut(self, start: int, nbytes: int, offset: int) -> StorageRegion:
        """Its bytes from ``start`` on, for another place."""
        return StorageRegion(offset, nbytes, self.storage, self.start + start)


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """Where in the file the elements of a tensor belong that lie scattered in their storage.

    Attributes:
        offset: A multiple of the elements' size.
        nbytes: Bytes in the file.
        tensor: The elements.
        stride: How they lie in the file, in elements.
    """

    offset: int
    nbytes: int
    tensor: torch.Tensor
    stride: tuple[int, ...]

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    @property
    def shrunk(self) -> bool:
        """Never: torch itself checks a tensor's bounds when it is copied."""
        return False

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
        self._chunks = chunk_ranges(len(view), chunk_size_for(len(view)))
        self._digests = [""] * len(self._chunks)

    def add(self, regions: tuple[Region, ...]) -> None:
        """Begins the copies from devices, and notes where the others come from."""
        for region in regions:
            self._sources.append(self._source(region))
        self._sources.sort(key=lambda source: source.offset)
        self._ends = [source.offset + source.nbytes for source in self._sources]

    def close(self) -> None:
        """Returns once no copy is under way and no reference to the buffer is left."""
        try:
            for source in self._sources:
                if source.wait is not None:
                    source.wait()
        finally:
            self._sources.clear()
            del self._anchor
            self._view.release()

    def run(self, threads: int) -> tuple[str, ...]:
        """Copies everything; gives the hashes of the chunks, or nothing where they are made later."""
        _Shares(len(self._chunks), self._fill_chunk).run(threads)
        return tuple(self._digests) if self._hashed else ()

    def _fill_chunk(self, number: int) -> None:
        """Copies one chunk, and hashes it.

        What is hashed is the destination: it holds the skeleton and many small tensors as one
        run of bytes, and it is what a reader will see. Hashing the source instead saves a twentieth
        of the time for large tensors, and cannot be done for those on a device.
        """
        start, length = self._chunks[number]
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
        self._digests[number] = hasher.hexdigest()

    def _source(self, region: Region) -> _Source:
        if isinstance(region, TensorRegion):
            return self._gather(region)
        storage = region.storage
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
            for start in range(0, region.nbytes, _DEVICE_PIECE):
                end = min(start + _DEVICE_PIECE, region.nbytes)
                target[start:end].copy_(content[start:end])
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
    chunks = chunk_ranges(len(content), chunk_size_for(len(content)))
    digests = [""] * len(chunks)

    def hash_chunk(number: int) -> None:
        start, length = chunks[number]
        hasher = xxhash.xxh3_128()
        with content[start : start + length] as chunk:
            # Lets go of the interpreter lock, which training needs meanwhile.
            hasher.update(chunk)
        digests[number] = hasher.hexdigest()

    _Shares(len(chunks), hash_chunk).run(threads)
    return tuple(digests)


class _Shares:
    """Numbered pieces of work that threads take one by one, until all is done or one has failed."""

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count = count
        self._work = work
        self._next: Iterator[int] = iter(range(count))
        self._lock = threading.Lock()
        self._failed = False

    def run(self, threads: int) -> None:
        """Works with the caller's thread and ``threads - 1`` more; raises what one of them raised."""
        count = min(threads, self._count) - 1
        helpers = _submit(self._take, count) if count > 0 else []
        try:
            self._take()
        finally:
            errors = [helper.exception() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error

    def _take(self) -> None:
        while True:
            with self._lock:
                number = None if self._failed else next(self._next, None)
            if number is None:
                return
            try:
                self._work(number)
            except BaseException:
                self._failed = True
                raise


_pools: dict[int, tuple[int, ThreadPoolExecutor]] = {}
_pools_lock = threading.Lock()


def _submit(work: Callable[[], None], count: int) -> list[Future[None]]:
    """Runs ``work`` in ``count`` threads, which stay: starting them takes as long as a chunk."""
    with _pools_lock:
        # A forked child has the parent's dictionary, but not its threads.
        size, pool = _pools.get(os.getpid(), (0, None))
        if pool is None or size < count:
            if pool is not None:
                pool.shutdown(wait=False)
            pool = ThreadPoolExecutor(count, thread_name_prefix="checkpoint-copy")
            _pools.clear()
            _pools[os.getpid()] = (count, pool)
        return [pool.submit(work) for _ in range(count)]
