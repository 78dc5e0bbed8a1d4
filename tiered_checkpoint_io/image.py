"""The exact bytes of a ``torch.save`` file, planned without copying tensor data.

``torch.save`` under ``skip_data`` writes everything but the tensors' bytes and leaves room for
them. That skeleton lies in a sparse anonymous file; the zip directory at its end tells where each
storage belongs. Filling then copies skeleton and storages, from wherever they are, to their places
in any writable buffer, in parallel, and hashes each chunk while it is still in the cache.

Limit: the CRC fields of tensor records in the zip directory are not computed. ``torch.load`` does
not look at them; ``unzip -t`` does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
import threading
import types
import zipfile
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash

from tiered_checkpoint_io.manifest import chunk_ranges, chunk_size_for

#: A piece is hashed right after it was copied, so it must fit the second-level cache.
_PIECE = 512 << 10
_MAX_THREADS = 16
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes of the file with one source: an address in this process, or a device's storage."""

    offset: int
    length: int
    address: int
    storage: torch.UntypedStorage | None


class Image:
    """A planned file.

    Attributes:
        size: Bytes of the file.
        planned: Whether tensor bytes will be copied straight from their storages; False where
            the state could only be written by plain ``torch.save``.
    """

    def __init__(self, size: int, segments: list[_Segment], skeleton: mmap.mmap, *, planned: bool) -> None:
        self.size = size
        self.planned = planned
        self._skeleton = skeleton
        self._segments = segments
        self._starts = [segment.offset for segment in segments]

    @property
    def chunk_size(self) -> int:
        """Bytes of one hashed chunk."""
        return chunk_size_for(self.size)

    def fill(
        self, view: memoryview, *, threads: int | None = None, pin: Callable[[memoryview], None] | None = None
    ) -> tuple[str, ...]:
        """Writes the file into ``view`` and hashes it.

        Args:
            view: Writable bytes, at least ``size`` long.
            threads: Copying threads; as many as torch uses by default.
            pin: Called with ``view`` before bytes are copied from a CUDA device, so that the
                owner of the buffer can register it as pinned memory.

        Returns:
            xxh3-128 of each chunk of ``chunk_size`` bytes, as hexadecimal digits.
        """
        view = view[: self.size]
        self._copy_from_devices(view, pin)
        anchor = ctypes.c_char.from_buffer(view)
        base = ctypes.addressof(anchor)
        ranges = chunk_ranges(self.size, self.chunk_size)
        count = min(_MAX_THREADS, len(ranges), threads or max(1, torch.get_num_threads()))
        try:
            if count == 1:
                return tuple(self._fill_chunk(view, base, *bounds) for bounds in ranges)
            jobs = [_pool().submit(self._fill_chunk, view, base, *bounds) for bounds in ranges]
            return tuple(job.result() for job in jobs)
        finally:
            del anchor

    def _fill_chunk(self, view: memoryview, base: int, start: int, length: int) -> str:
        # The destination is hashed, not the source: the digest then speaks of the bytes that a
        # reader will find, even where someone else writes to a tensor during the copy.
        digest = xxhash.xxh3_128()
        end = start + length
        index = bisect_right(self._starts, start) - 1
        position = hashed = start
        while position < end:
            segment = self._segments[index]
            stop = min(end, segment.offset + segment.length)
            while position < stop:
                step = min(stop - position, _PIECE)
                if segment.address:
                    ctypes.memmove(base + position, segment.address + position - segment.offset, step)
                position += step
                if position - hashed >= _PIECE:
                    digest.update(view[hashed:position])
                    hashed = position
            index += 1
        digest.update(view[hashed:end])
        return digest.hexdigest()

    def _copy_from_devices(self, view: memoryview, pin: Callable[[memoryview], None] | None) -> None:
        remote = [segment for segment in self._segments if not segment.address and segment.storage is not None]
        if not remote:
            return
        on_cuda = any(segment.storage is not None and segment.storage.device.type == "cuda" for segment in remote)
        if on_cuda and pin is not None:
            pin(view)
        for segment in remote:
            source = torch.empty(0, dtype=torch.uint8, device=cast("Any", segment.storage).device)
            source.set_(cast("Any", segment.storage))
            target = torch.frombuffer(view, dtype=torch.uint8, count=segment.length, offset=segment.offset)
            target.copy_(source, non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.synchronize()


def plan(state: Any) -> Image:
    """Plans the file that ``torch.save(state, ...)`` would write.

    What cannot be laid out without its data is written by plain ``torch.save``, into memory.

    Args:
        state: Anything that ``torch.save`` takes.

    Raises:
        Exception: Whatever ``torch.save`` itself raises for ``state``.
    """
    try:
        return _plan(state)
    except Exception:
        # Whatever the reason, torch.save is the judge: it works, or its error is the caller's.
        return _serialize(state)


def _plan(state: Any) -> Image:
    storages: dict[str, Any] = {}
    descriptor = os.memfd_create("tiered-checkpoint-image", os.MFD_CLOEXEC)
    try:
        with torch.serialization.skip_data():
            torch.save(state, f"/proc/self/fd/{descriptor}", pickle_module=_capturing_pickle(storages))
        size = os.fstat(descriptor).st_size
        skeleton = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    base = _address(skeleton)
    segments: list[_Segment] = []
    position = 0
    for offset, length, key in _tensor_records(skeleton):
        storage = storages[key]
        untyped = getattr(storage, "_untyped_storage", storage)
        if untyped.nbytes() != length:
            raise ValueError(f"record {key} has {length} bytes, its storage {untyped.nbytes()}")
        if offset > position:
            segments.append(_Segment(position, offset - position, base + position, None))
        if untyped.device.type == "cpu":
            segments.append(_Segment(offset, length, untyped.data_ptr(), untyped))
        elif untyped.device.type == "cuda":
            segments.append(_Segment(offset, length, 0, untyped))
        else:
            host = untyped.cpu()
            segments.append(_Segment(offset, length, host.data_ptr(), host))
        position = offset + length
    if size > position:
        segments.append(_Segment(position, size - position, base + position, None))
    return Image(size, segments, skeleton, planned=True)


def _serialize(state: Any) -> Image:
    descriptor = os.memfd_create("tiered-checkpoint-image", os.MFD_CLOEXEC)
    try:
        torch.save(state, f"/proc/self/fd/{descriptor}")
        size = os.fstat(descriptor).st_size
        content = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return Image(size, [_Segment(0, size, _address(content), None)], content, planned=False)


def _capturing_pickle(storages: dict[str, Any]) -> Any:
    """A pickle module for ``torch.save`` whose Pickler notes each storage under its record's key."""

    class Pickler(pickle.Pickler):
        def __init__(self, file: Any, protocol: int | None = None) -> None:
            inner = cast("Any", self).persistent_id

            def persistent_id(obj: Any) -> Any:
                token = inner(obj)
                if isinstance(token, tuple) and token and token[0] == "storage":
                    storages.setdefault(token[2], obj)
                return token

            # An attribute of the instance comes before the method of torch's subclass.
            cast("Any", self).persistent_id = persistent_id
            super().__init__(file, protocol)

    module = types.ModuleType("pickle")
    module.__dict__.update(pickle.__dict__)
    module.__dict__["Pickler"] = Pickler
    return module


def _tensor_records(skeleton: mmap.mmap) -> list[tuple[int, int, str]]:
    """``(offset, length, key)`` of each non-empty storage record, in the order of the file."""
    records = []
    with zipfile.ZipFile(cast("Any", _Reader(skeleton))) as archive:
        for entry in archive.infolist():
            _, _, record = entry.filename.partition("/")
            if not record.startswith("data/") or entry.file_size == 0:
                continue
            signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(skeleton, entry.header_offset)
            if signature != b"PK\x03\x04":
                raise ValueError(f"no local header for {entry.filename}")
            offset = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            records.append((offset, entry.file_size, record[len("data/") :]))
    return sorted(records)


class _Reader:
    """The part of a binary file that ``zipfile`` reads a directory through, over a mapping."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        return self._position

    def read(self, count: int = -1) -> bytes:
        stop = len(self._data) if count < 0 else min(len(self._data), self._position + count)
        data = self._data[self._position : stop]
        self._position = stop
        return data


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _pool() -> ThreadPoolExecutor:
    # One pool a process: after a fork, the parent's threads do not exist in the child.
    with _pools_lock:
        if os.getpid() not in _pools:
            _pools.clear()
            threads = min(_MAX_THREADS, max(1, torch.get_num_threads()))
            _pools[os.getpid()] = ThreadPoolExecutor(threads, thread_name_prefix="tiered-copy")
        return _pools[os.getpid()]
