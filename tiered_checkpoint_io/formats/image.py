"""A planned file: the bytes around the tensors', the tensors' own, and the way to put both together in a buffer.

The bytes are copied in parallel, and hashed during the copy or later. About 128 bytes of the zip file are between any
two tensors, and optimizers keep a number for each parameter. So one call copies all stretches of a piece of the file: a
call for each stretch would cost as much as copying some KiB, and the interpreter lock would change hands each time.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import xxhash

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model.documents import chunk_ranges, chunk_size_for


class Untouched(NamedTuple):
    """Pages of a mapped file that a mapping has not touched.

    Attributes:
        descriptor: The file.
        start: From this byte on.
    """

    descriptor: int
    start: int


class Written:
    """Takes the place of a stretch of the mapping: a piece of it at a time."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Takes the file, and the size of the largest piece."""
        self._descriptor = descriptor
        self._buffer = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self._buffer)

    def content(self, nbytes: int) -> memoryview:
        """Returns the first bytes of the buffer."""
        return memoryview(self._buffer).cast("B")[:nbytes]

    def write(self, nbytes: int, offset: int) -> None:
        """Writes the first bytes of the buffer to their place in the file."""
        left = self.content(nbytes)
        while left:
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written


#: Most stretches that the system takes in one call.
_AT_ONCE = 1024
#: So few stretches of a piece are copied one by one, each by a call that is faster than the one for many.
_FEW = 24

_Integers = np.ndarray[Any, np.dtype[np.int64]]


class Copies:
    """All copies into one buffer.

    Attributes:
        calls: Number of calls that they take.
    """

    def __init__(
        self, target: ctypes.Array[Any], offsets: _Integers, lengths: _Integers, addresses: _Integers, *, piece: int
    ) -> None:
        """Takes a buffer, which is not kept alive, and the stretches that are copied into it, of which none overlap.

        ``piece`` bytes of the buffer are filled at once.
        """
        order = np.argsort(offsets, kind="stable")
        order = order[lengths[order] > 0]
        offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
        ends, first = offsets + lengths, offsets // piece
        cuts = (ends - 1) // piece - first + 1
        # A row is a stretch's part of a piece.
        rows = np.repeat(np.arange(len(offsets)), cuts)
        pieces = np.arange(len(rows)) - np.repeat(np.cumsum(cuts) - cuts - first, cuts)
        lows, highs = np.maximum(offsets[rows], pieces * piece), np.minimum(ends[rows], (pieces + 1) * piece)
        self._places = ctypes.addressof(target) + lows
        self._sources = np.stack((addresses[rows] + (lows - offsets[rows]), highs - lows), axis=1)
        # A batch of rows begins with a piece, or after the most rows of one call.
        begins = (np.arange(len(rows)) - np.searchsorted(pieces, pieces)) % _AT_ONCE == 0
        batches = np.append(np.flatnonzero(begins), len(rows))
        self._batches = batches.tolist()
        #: First batch of each piece.
        self._pieces = np.searchsorted(pieces[batches[:-1]], np.arange(-(-len(target) // piece) + 1)).tolist()
        # A run of a batch's rows follows without a gap in the buffer.
        runs = np.flatnonzero(begins | np.append(True, lows[1:] != highs[:-1])[: len(rows)])
        totals = np.append(0, np.cumsum(highs - lows))[np.append(runs, len(rows))]
        self._targets = np.stack((self._places[runs], np.diff(totals)), axis=1)
        self._runs = np.searchsorted(runs, batches).tolist()
        self._gather = gathering()
        single = np.diff(batches) <= (_FEW if self._gather is not None else _AT_ONCE)
        alone = np.flatnonzero(np.repeat(single, np.diff(batches)))
        self._alone = self._columns(alone)
        #: Start of each batch's rows among the rows that are copied one by one.
        self._firsts = np.searchsorted(alone, batches).tolist()
        self.calls = len(alone) + int(np.count_nonzero(~single))

    def copy(self, piece: int, away: int = 0) -> None:
        """Copies the bytes that belong in a piece, by its number, to ``away`` bytes beyond the buffer's own."""
        for batch in range(*self._pieces[piece : piece + 2]):
            start, end = self._firsts[batch : batch + 2]
            if start < end:
                _copy_each(*(column[start:end] for column in self._alone), away=away)
            elif not self._copy_batch(batch, away):
                _copy_each(*self._columns(slice(*self._batches[batch : batch + 2])), away=away)

    def _copy_batch(self, batch: int, away: int) -> bool:
        targets = self._targets[slice(*self._runs[batch : batch + 2])]
        sources = self._sources[slice(*self._batches[batch : batch + 2])]
        return self._gather is not None and self._gather(np.add(targets, (away, 0)), sources)

    def _columns(self, rows: Any) -> tuple[list[int], list[int], list[int]]:
        return self._places[rows].tolist(), self._sources[rows, 0].tolist(), self._sources[rows, 1].tolist()


def _copy_each(targets: list[int], sources: list[int], lengths: list[int], *, away: int) -> None:
    if away:
        targets = [target + away for target in targets]
    # No line of Python for each, of which there may be thousands. A call releases the interpreter lock, unlike a copy
    # between memoryviews.
    deque(map(ctypes.memmove, targets, sources, lengths), 0)


@functools.cache
def gathering() -> Callable[[_Integers, _Integers], bool] | None:
    """Returns a function that copies many stretches of this process' memory at once; None if the system lacks it.

    The function takes rows of an address and a length, the targets and the sources, of equal total length. It returns
    True if all bytes were copied.
    """
    try:
        write = ctypes.CDLL(None).process_vm_writev
    except (AttributeError, OSError, TypeError):
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    write.argtypes, write.restype = (ctypes.c_int, pointer, count, pointer, count, count), ctypes.c_ssize_t

    def gather(targets: _Integers, sources: _Integers) -> bool:
        done = write(os.getpid(), sources.ctypes.data, len(sources), targets.ctypes.data, len(targets), 0)
        return bool(done == sources[:, 1].sum())

    # A container's rules may forbid it.
    tried = np.arange(2, dtype=np.int64)
    rows = np.array([[tried.ctypes.data, 8], [tried.ctypes.data + 8, 8]])
    return gather if gather(rows[:1], rows[1:]) and tried[0] == 1 else None


#: Copied and then hashed at once: small enough that what was just written is still in a cache near the core that hashes
#: it, large enough that threads seldom wait for the interpreter lock.
_PIECE = 512 << 10
_MAX_THREADS = 8
#: Bytes that are registered as pinned memory at once: during a registration, the driver lets no thread launch work on a
#: GPU. It refuses one copy into two registrations, or into memory that is only partly registered.
PINNED_PIECE = 64 << 20
#: With shorter stretches, bytes, one thread is faster than two.
_WORTH_A_THREAD = 20 << 10
_ASKED_AT_ONCE = 256
_CPU = torch.device("cpu")


class Segment(NamedTuple):
    """Bytes of the file that are no tensor's: the pickle, and the zip file's own structure."""

    offset: int
    data: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data)


class StorageRegion(NamedTuple):
    """The place in the file of bytes of a storage: ``nbytes`` of them, from byte ``start`` on."""

    offset: int
    nbytes: int
    storage: torch.UntypedStorage
    start: int = 0

    def cut(self, start: int, nbytes: int, offset: int) -> StorageRegion:
        """Returns the region's ``nbytes`` from ``start`` on, at another offset of the file."""
        return StorageRegion(offset, nbytes, self.storage, self.start + start)


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """The place in the file of the elements of a tensor, which are scattered in their storage."""

    #: A multiple of the elements' size.
    offset: int
    nbytes: int
    tensor: torch.Tensor
    #: Stride of the elements in the file.
    stride: tuple[int, ...]

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    def gathered(self) -> StorageRegion:
        """Returns the same bytes, copied to a storage of their own."""
        with torch.no_grad():
            target = torch.empty(self.nbytes // self.tensor.element_size(), dtype=self.tensor.dtype, device="cpu")
            target.as_strided(self.tensor.shape, self.stride).copy_(self.tensor)
        return StorageRegion(self.offset, self.nbytes, target.untyped_storage())


Region = StorageRegion | TensorRegion


@dataclass(frozen=True, slots=True, eq=False)
class Segments(Sequence[Segment]):
    """Many segments: one row of bytes, the offset of each in the file, and the cuts between them in the row."""

    data: memoryview
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    cuts: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        start, end = self.cuts[:-1][index], self.cuts[1:][index]
        return Segment(int(self.offsets[index]), self.data[start:end])

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        """Returns the same bytes in one row."""
        if isinstance(segments, cls):
            return segments
        texts = [segment.data for segment in segments]
        cuts = np.concatenate(([0], np.cumsum(_integers(map(len, texts)))))
        return cls(memoryview(b"".join(texts)), _integers([segment.offset for segment in segments]), cuts)


@dataclass(frozen=True, slots=True, eq=False)
class StorageRegions(Sequence[StorageRegion]):
    """Bytes of many storages: their offsets in the file, their lengths, the first byte in each, and all devices."""

    offsets: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    storages: Sequence[torch.UntypedStorage]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    devices: set[torch.device]

    def __len__(self) -> int:
        return len(self.storages)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        offset, nbytes, start = (int(each[index]) for each in (self.offsets, self.lengths, self.starts))
        return StorageRegion(offset, nbytes, self.storages[index], start)


def default_threads() -> int:
    """Returns the number of threads that copy by default: a share of the node's cores for each local rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(_MAX_THREADS, max(1, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


class Filling:
    """One filling of a buffer: which threads share the chunks of the file."""

    def __init__(
        self,
        view: memoryview,
        segments: Sequence[Segment],
        *,
        hashed: bool = True,
        untouched: Untouched | None = None,
        pinned: int = 0,
    ) -> None:
        self._view = view
        self._hashed = hashed
        self._pinned = pinned
        self._untouched = untouched
        self._chunk_size = chunk_size_for(len(view))
        self._anchor = (ctypes.c_char * len(view)).from_buffer(view)
        self._base = ctypes.addressof(self._anchor)
        self._segments = segments
        #: Stretches that devices write: the end of each, and a function that waits for it.
        self._arrivals: list[tuple[int, Callable[[], None]]] = []

    def run(self, regions: Sequence[Region], threads: int) -> tuple[str, ...]:
        """Copies everything; returns the hashes of the chunks, or an empty tuple if they are made later.

        When it returns, no copy is under way, and no reference to the buffer is left.
        """
        try:
            plain = cast("Sequence[StorageRegion]", regions)
            if not is_plain(regions):
                plain = [each for each in regions if isinstance(each, StorageRegion) and each.storage.device == _CPU]
                for region in regions:
                    if not isinstance(region, StorageRegion) or region.storage.device != _CPU:
                        self._begin(region)
            self._arrivals.sort(key=itemgetter(0))
            piece = _PIECE if self._hashed or self._untouched is not None else self._chunk_size
            copies = self._copies_of(plain, piece)
            chunks = chunk_ranges(len(self._view), self._chunk_size)
            if copies.calls * _WORTH_A_THREAD > len(self._view):
                # Several threads would wait for each other's calls: the interpreter lock changes hands at each call.
                threads = 1
            digests = in_parallel(lambda chunk: self._fill_chunk(chunk, copies, piece), chunks, threads)
            return tuple(digests) if self._hashed else ()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            for _, wait in self._arrivals:
                wait()
        finally:
            self._arrivals.clear()
            del self._anchor
            self._view.release()

    def _copies_of(self, regions: Sequence[StorageRegion], piece: int) -> Copies:
        """Notes the addresses of the bytes of each stretch of the file."""
        segments = Segments.of(self._segments)
        storages: Sequence[torch.UntypedStorage]
        if isinstance(regions, StorageRegions):
            storages, lengths, offsets, starts = regions.storages, regions.lengths, regions.offsets, regions.starts
        else:
            storages = [region.storage for region in regions]
            starts = _integers([region.start for region in regions])
            lengths = _integers([region.nbytes for region in regions])
            offsets = _integers([region.offset for region in regions])
        data = _addresses_of(storages, starts + lengths)
        self._text = np.frombuffer(segments.data, np.uint8)
        lengths = np.concatenate((np.diff(segments.cuts), lengths))
        offsets = np.concatenate((segments.offsets, offsets))
        addresses = np.concatenate((self._text.ctypes.data + segments.cuts[:-1], data + starts))
        return Copies(self._anchor, offsets, lengths, addresses, piece=piece)

    def _fill_chunk(self, chunk: tuple[int, int], copies: Copies, size: int) -> str:
        """Copies one chunk, and hashes it.

        The destination is hashed: it holds the skeleton and many small tensors as one
        run of bytes, and it is what a reader will see. Hashing the source instead saves a twentieth of the time for
        large tensors, and is impossible for tensors on a device.
        """
        begin, length = chunk
        hasher = xxhash.xxh3_128()
        written: Written | None = None
        if self._untouched is not None and begin + length > self._untouched.start:
            written = Written(self._untouched.descriptor, min(size, length))
        for piece in range(begin, begin + length, size):
            end = min(piece + size, begin + length)
            away = 0 if written is None else written.address - (self._base + piece)
            copies.copy(piece // size, away)
            if self._arrivals:
                self._await(piece, end)
            if self._hashed:
                hasher.update(self._view[piece:end] if written is None else written.content(end - piece))
            if written is not None:
                written.write(end - piece, piece)
        return hasher.hexdigest()

    def _await(self, begin: int, end: int) -> None:
        """Waits for the bytes that devices write there; stretches before were waited for, or are another chunk's."""
        for index in range(bisect.bisect_right(self._arrivals, begin, key=itemgetter(0)), len(self._arrivals)):
            stop, wait = self._arrivals[index]
            wait()
            if stop >= end:
                break

    def _begin(self, region: Region) -> None:
        """Copies bytes that have no address; from devices, it only begins to."""
        cuts = cuts_of(region.offset, region.offset + region.nbytes, self._pinned)
        is_split = len(cuts) > 1 and region.storage.device.type == "cuda"
        if isinstance(region, TensorRegion):
            if is_split:
                self._begin(region.gathered())
            else:
                self._gather(region)
            return
        offset, nbytes, storage, start = region
        _check_sizes(storage.nbytes() - start - nbytes)
        if is_split:
            for low, high in cuts:
                self._begin(region.cut(low - offset, high - low, low))
            return
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(cast("Any", storage))
            content = whole[start : start + nbytes]
            target = torch.frombuffer(self._view, dtype=torch.uint8, offset=offset, count=nbytes)
            if storage.device.type != "cuda":
                target.copy_(content)
                return
            # On the current stream, and so after the computation of the tensor. Copies of all regions are queued at
            # once; chunks are hashed while later ones run.
            with torch.cuda.device(storage.device):
                target.copy_(content, non_blocking=True)
                done = cast("Any", torch.cuda).Event()
                done.record()

            def wait() -> None:
                # Another thread's device is the first, if it would get a context, of hundreds of megabytes.
                with torch.cuda.device(storage.device):
                    done.synchronize()

            self._arrivals.append((offset + nbytes, wait))

    def _gather(self, region: TensorRegion) -> None:
        tensor = region.tensor
        with torch.no_grad():
            target = torch.frombuffer(
                self._view, dtype=tensor.dtype, offset=region.offset, count=region.nbytes // tensor.element_size()
            )
            target.as_strided(tensor.shape, region.stride).copy_(tensor)


def cuts_of(start: int, end: int, pinned: int) -> list[tuple[int, int]]:
    """Returns the stretches between two offsets that a device may copy to at once if the first bytes are ``pinned``."""
    found = []
    while start < end:
        stop = end if start >= pinned else min(end, pinned, (start // PINNED_PIECE + 1) * PINNED_PIECE)
        found.append((start, stop))
        start = stop
    return found


def is_plain(regions: Sequence[Region]) -> bool:
    """Returns whether all bytes lie in this process' memory as they belong in the file."""
    are_storages = isinstance(regions, StorageRegions) or set(map(type, regions)) <= {StorageRegion}
    return are_storages and not devices_of(regions) - {_CPU}


def devices_of(regions: Iterable[Region]) -> set[torch.device]:
    """Returns all devices that hold bytes of some regions."""
    if isinstance(regions, StorageRegions):
        return regions.devices
    return set(map(attrgetter("storage.device"), regions))


def _addresses_of(storages: Sequence[torch.UntypedStorage], ends: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the addresses of storages; ConfigError if one has fewer bytes than are copied, which end there."""
    found = np.empty((2, len(storages)), np.int64)
    for start in range(0, len(storages), _ASKED_AT_ONCE):
        # Few at once, so that they are still in the core's cache when the other is asked of them.
        some = storages[start : start + _ASKED_AT_ONCE]
        found[0, start : start + len(some)] = list(map(torch.UntypedStorage.nbytes, some))
        found[1, start : start + len(some)] = list(map(torch.UntypedStorage.data_ptr, some))
    _check_sizes(found[0] - ends)
    addresses: np.ndarray[Any, np.dtype[np.int64]] = found[1]
    return addresses


def _check_sizes(left: Any) -> None:
    """Takes the number of bytes that storages have beyond the copied ones."""
    if np.any(left < 0):
        raise ConfigError(
            "a tensor was resized between planning and capturing a checkpoint",
            operation="capture",
            hint="do not change the state while it is being saved",
        )


def _integers(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(values, np.int64)


@dataclass(frozen=True, eq=False)
class Image:
    """A planned file.

    The image refers to the state's own storages, and keeps them alive. :meth:`fill` copies their present content, not
    that at the time of the plan: fill before anything may change them.
    """

    size: int
    #: Bytes that are no tensor's, or a function that makes them when they are first asked for.
    around: Sequence[Segment] | Callable[[], Sequence[Segment]]
    regions: Sequence[Region]
    _: KW_ONLY
    #: True if tensors' bytes are copied straight from their storages; False if ``torch.save`` had to write the whole
    #: file beforehand.
    planned: bool = True

    @cached_property
    def segments(self) -> Sequence[Segment]:
        """The bytes of the file that are no tensor's."""
        return self.around() if callable(self.around) else self.around

    @property
    def chunk_size(self) -> int:
        """Bytes of one hashed chunk."""
        return chunk_size_for(self.size)

    def fill(
        self,
        view: memoryview,
        *,
        threads: int | None = None,
        pin: Callable[[memoryview], int] | None = None,
        hashed: bool = True,
        untouched: Untouched | None = None,
    ) -> tuple[str, ...]:
        """Writes the whole file, and hashes it.

        Args:
            view: Target: writable, contiguous, at least ``size`` bytes. Bytes beyond that are left as they are.
            threads: Number of threads; by default this process's share of the node's cores.
            pin: Called with the buffer before bytes are copied from a CUDA device, which is the current one then, so
                that its owner can register it as pinned memory; it gives how many bytes, from the first on, are.
            hashed: True to hash it during the copy; see :meth:`hashes` for later.
            untouched: Pages of the buffer that are written by its file, and not through it. Only if :func:`is_plain`.

        Returns:
            xxh3-128 of each chunk of ``chunk_size`` bytes, as hexadecimal digits; nothing if not ``hashed``.

        Raises:
            ConfigError: A storage has become smaller since the file was planned.
        """
        target = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        if len(target) < self.size:
            raise ValueError(f"the buffer has {len(target)} bytes, the image {self.size}")
        target, pinned = target[: self.size], 0
        devices = [device for device in devices_of(self.regions) if device.type == "cuda"]
        if pin is not None and devices:
            with torch.cuda.device(devices[0]):
                pinned = pin(target)
        return Filling(target, self.segments, hashed=hashed, untouched=untouched, pinned=pinned).run(
            self.regions, threads or default_threads()
        )

    def hashes(self, view: memoryview, *, threads: int | None = None) -> tuple[str, ...]:
        """Returns the hashes of the file that was written to ``view``, as :meth:`fill` does.

        Hashing during the copy costs less in all. Hashing later costs the caller of :meth:`fill` less.
        """

        def hash_chunk(chunk: tuple[int, int]) -> str:
            start, length = chunk
            hasher = xxhash.xxh3_128()
            with view[start : start + length] as data:
                # Releases the interpreter lock, which training needs meanwhile.
                hasher.update(data)
            return hasher.hexdigest()

        return tuple(in_parallel(hash_chunk, chunk_ranges(self.size, self.chunk_size), threads or default_threads()))
