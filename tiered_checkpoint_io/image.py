"""The exact bytes of a ``torch.save`` file, planned without copying tensor data.

:func:`plan` lets ``torch.save`` itself write the file, into a recorder that keeps everything but
the contents of tensors: for these it only notes where in the file they belong. :meth:`Image.fill`
then puts the file together in a buffer of the caller's, copying each tensor's storage once, in
parallel, straight from where it lies, and hashes it on the way. The result is a file that
``torch.load`` reads as it reads any other, ``mmap=True`` included, because its layout is that of
``torch.save`` and of nobody else.

Whatever cannot be laid out so (quantized tensors, backends without storages, a torch release that
lacks the means) is saved by plain ``torch.save`` into memory first; that costs time and memory, but
it is never an error.

The zip directory holds no checksums of the tensors' records: they are not known when it is written.
``torch.load`` ignores them, the manifest's hashes do their work, but ``unzip -t`` complains.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
import xxhash

from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.manifest import chunk_ranges, chunk_size_for

#: Copied and then hashed at once: small enough that what was just written is still in the cache of
#: the core that hashes it, large enough that the interpreter's cost for a piece does not show.
_PIECE = 512 << 10
#: Copied at once from a device that has no asynchronous copies.
_DEVICE_PIECE = 64 << 20
_MAX_THREADS = 8


class _CannotPlanError(Exception):
    """The file has another layout than expected, so its tensors' places are not known."""


# ------------------------------------------------------------------------------------------- image
@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of the file that are no tensor's: the pickle, and the zip file's own structure."""

    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class StorageRegion:
    """Where in the file the content of a storage belongs."""

    offset: int
    nbytes: int
    storage: torch.UntypedStorage


class Image:
    """A planned file.

    It refers to the state's own storages, and shows what they hold when it is filled in, not when
    it was planned: fill it before anything may change them. It keeps them alive.

    Attributes:
        size: The file's size in bytes.
        planned: Whether tensors' bytes are copied straight from their storages; False where
            ``torch.save`` had to write the whole file beforehand.
    """

    def __init__(
        self, size: int, segments: tuple[Segment, ...], regions: tuple[StorageRegion, ...], *, planned: bool
    ) -> None:
        self.size = size
        self.planned = planned
        self._segments = segments
        self._regions = regions

    @property
    def chunk_size(self) -> int:
        """Bytes of one hashed chunk."""
        return chunk_size_for(self.size)

    def fill(
        self, view: memoryview, *, threads: int | None = None, pin: Callable[[memoryview], None] | None = None
    ) -> tuple[str, ...]:
        """Writes the whole file, and hashes it.

        Args:
            view: Where to: writable, contiguous, at least ``size`` bytes. What lies behind is left.
            threads: How many threads copy; by default as many as this process's share of the
                node's cores.
            pin: Called with the buffer before bytes are copied from a CUDA device, so that its
                owner can register it as pinned memory.

        Returns:
            xxh3-128 of each chunk of ``chunk_size`` bytes, as hexadecimal digits.

        Raises:
            UsageError: A storage has become smaller since the file was planned.
        """
        target = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        if len(target) < self.size:
            raise ValueError(f"the buffer has {len(target)} bytes, the image {self.size}")
        for region in self._regions:
            if region.storage.nbytes() < region.nbytes:
                raise UsageError(
                    "a tensor was resized between planning and capturing a checkpoint",
                    operation="capture",
                    hint="do not change the state while it is being saved",
                )
        target = target[: self.size]
        if pin is not None and any(region.storage.is_cuda for region in self._regions):
            pin(target)
        filling = _Filling(target, self._segments)
        try:
            filling.add(self._regions)
            return filling.run(threads or default_threads())
        finally:
            filling.close()


def default_threads() -> int:
    """How many threads copy by default: the node's cores, shared with the other local ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MAX_THREADS, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


# ---------------------------------------------------------------------------------------- planning
def plan(state: object) -> Image:
    """Plans the file that ``torch.save(state, ...)`` would write.

    Raises:
        Exception: Whatever ``torch.save`` raises for this state.
    """
    try:
        return _plan_by_layout(state)
    except Exception:
        # Whatever the reason, torch.save is the judge: it works, or its error is the caller's.
        return _plan_by_saving(state)


def _plan_by_layout(state: object) -> Image:
    recorder = _Recorder()
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        with ExitStack() as without_data:
            pickler = _capturing_pickler(storages, without_data)
            module = cast("ModuleType", SimpleNamespace(Pickler=pickler, __name__="pickle"))
            torch.save(state, cast("BinaryIO", recorder), pickle_module=module)
        # Records come in the order in which the pickler met their storages; empty ones leave no hole.
        found = [storage for storage in storages.values() if storage.nbytes()]
    finally:
        # The pickler's class, which only the garbage collector frees, refers to the dictionary:
        # what is in it must not be kept until then.
        storages.clear()
    holes = recorder.holes
    if [length for _, length in holes] != [storage.nbytes() for storage in found]:
        raise _CannotPlanError("the file's records are not the state's storages")
    if any(storage.device.type == "meta" for storage in found):
        raise _CannotPlanError("a storage has no data")
    regions = tuple(StorageRegion(*hole, storage) for hole, storage in zip(holes, found, strict=True))
    return Image(recorder.position, recorder.segments(), regions, planned=True)


def _plan_by_saving(state: object) -> Image:
    # An unnamed file in memory rather than a BytesIO: it grows without being copied, and it is
    # not part of the process's own heap.
    with ExitStack() as files:
        if hasattr(os, "memfd_create"):
            file: BinaryIO = files.enter_context(os.fdopen(os.memfd_create("checkpoint", os.MFD_CLOEXEC), "w+b"))
        else:
            file = cast("BinaryIO", files.enter_context(tempfile.TemporaryFile()))
        torch.save(state, file)
        file.flush()
        size = os.fstat(file.fileno()).st_size
        data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    return Image(size, (Segment(0, data),), (), planned=False)


def _capturing_pickler(storages: dict[str, torch.UntypedStorage], without_data: ExitStack) -> type[pickle.Pickler]:
    kinds = (torch.storage.TypedStorage, torch.UntypedStorage)

    class CapturingPickler(pickle.Pickler):
        """The base of the pickler that ``torch.save`` defines: sees the storages that it meets."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            original = cls.persistent_id

            def persistent_id(self: pickle.Pickler, obj: Any) -> Any:
                # Asked of every object in the state, so the answer for most of them must be quick.
                if not isinstance(obj, kinds):
                    return None
                reference = original(self, obj)
                if reference is not None:
                    storage: Any = obj
                    storages[reference[2]] = getattr(storage, "_untyped_storage", storage)
                return reference

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

        def dump(self, obj: Any, /) -> None:
            # The state is pickled as always; only the records that follow are written without
            # data. An object that calls torch.save while it is pickled gets all of its bytes.
            super().dump(obj)
            without_data.enter_context(torch.serialization.skip_data())

    return CapturingPickler


class _Recorder:
    """A file that is written from front to end: keeps what is written, and where it is skipped."""

    def __init__(self) -> None:
        self.position = 0
        self.holes: list[tuple[int, int]] = []
        self._segments: list[tuple[int, bytearray]] = []
        self._current = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        self._current += data
        self.position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or offset < 0:
            raise _CannotPlanError("the file is not written from front to end")
        if offset:
            self._end_segment()
            self.holes.append((self.position, offset))
            self.position += offset
        return self.position

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Nothing to do."""

    def segments(self) -> tuple[Segment, ...]:
        self._end_segment()
        return tuple(Segment(offset, memoryview(bytes(data))) for offset, data in self._segments)

    def _end_segment(self) -> None:
        if self._current:
            self._segments.append((self.position - len(self._current), self._current))
            self._current = bytearray()


# ----------------------------------------------------------------------------------------- filling
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


class _Filling:
    """One filling of a buffer: which threads share the chunks of the file."""

    def __init__(self, view: memoryview, segments: tuple[Segment, ...]) -> None:
        self._view = view
        self._anchor = (ctypes.c_char * len(view)).from_buffer(view)
        self._base = ctypes.addressof(self._anchor)
        self._sources = [_Source(segment.offset, len(segment.data), data=segment.data) for segment in segments]
        self._ends: list[int] = []
        self._chunks = chunk_ranges(len(view), chunk_size_for(len(view)))
        self._digests = [""] * len(self._chunks)
        self._next: Iterator[int] = iter(range(len(self._chunks)))
        self._lock = threading.Lock()
        self._failed = False

    def add(self, regions: tuple[StorageRegion, ...]) -> None:
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
        helpers: list[Future[None]] = []
        count = min(threads, len(self._chunks)) - 1
        if count > 0:
            helpers = _submit(self._work, count)
        try:
            self._work()
        finally:
            errors = [helper.exception() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error
        return tuple(self._digests)

    def _work(self) -> None:
        while True:
            with self._lock:
                index = None if self._failed else next(self._next, None)
            if index is None:
                return
            try:
                self._digests[index] = self._fill_chunk(*self._chunks[index])
            except BaseException:
                self._failed = True
                raise

    def _fill_chunk(self, start: int, length: int) -> str:
        """Copies and hashes one chunk.

        What is hashed is the destination: it holds the skeleton and many small tensors as one
        run of bytes, and it is what a reader will see. Hashing the source instead saves a twentieth
        of the time for large tensors, and cannot be done for those on a device.
        """
        hasher = xxhash.xxh3_128()
        index = bisect.bisect_right(self._ends, start)
        sources, view, base = self._sources, self._view, self._base
        for piece in range(start, start + length, _PIECE):
            end = min(piece + _PIECE, start + length)
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
            hasher.update(view[piece:end])
        return hasher.hexdigest()

    def _source(self, region: StorageRegion) -> _Source:
        storage = region.storage
        if storage.device.type == "cpu":
            return _Source(region.offset, region.nbytes, address=storage.data_ptr())
        with torch.no_grad():
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(cast("Any", storage))
            target = torch.frombuffer(self._view, dtype=torch.uint8, offset=region.offset, count=region.nbytes)
            if storage.device.type == "cuda":
                # On the current stream, and so behind whatever still computes the tensor. Copies
                # of all regions are queued at once; chunks are hashed while later ones run.
                with torch.cuda.device(storage.device):
                    target.copy_(content[: region.nbytes], non_blocking=True)
                    done = cast("Any", torch.cuda).Event()
                    done.record()
                return _Source(region.offset, region.nbytes, wait=done.synchronize)
            for start in range(0, region.nbytes, _DEVICE_PIECE):
                end = min(start + _DEVICE_PIECE, region.nbytes)
                target[start:end].copy_(content[start:end])
        return _Source(region.offset, region.nbytes)


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
