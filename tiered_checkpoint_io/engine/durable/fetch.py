"""Bytes from the durable tier into node memory, each range verified as it arrives."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from tiered_checkpoint_io.errors import RestoreError, TieredCheckpointError
from tiered_checkpoint_io.model.hashing import chunk_ranges, chunk_size_for
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store

#: xxh3 at full speed saturates memory with few threads.
_HASH_THREADS = 4


def fetch(store: Store, entry: FileEntry, view: memoryview, *, concurrency: int) -> None:
    """Reads a file by ranged requests, one for each hashed chunk.

    Args:
        store: Where from.
        entry: Which file.
        view: Where to: ``entry.size`` writable bytes.
        concurrency: Requests in flight at once.

    Raises:
        CorruptCheckpointError: The object is short, or a chunk differs from its hash.
        StoreError: It could not be read.
    """
    ranges = entry.chunks
    where = f"{store.url}/{entry.path}"

    def one(index: int) -> None:
        offset, length = ranges[index]
        target = view[offset : offset + length]
        store.read_into(entry.path, offset, target)
        entry.check_chunk(index, target, tier="durable", where=where)

    _all(one, len(ranges), concurrency)


def fetch_unverified(store: Store, key: str, view: memoryview, *, concurrency: int) -> None:
    """Reads an object of which no hashes are known, by ranged requests.

    Args:
        store: Where from.
        key: Which object.
        view: Where to: as many writable bytes as the object has.
        concurrency: Requests in flight at once.

    Raises:
        CorruptCheckpointError: The object is shorter than ``view``.
        StoreError: It could not be read.
    """
    ranges = chunk_ranges(len(view), chunk_size_for(len(view)))

    def one(index: int) -> None:
        offset, length = ranges[index]
        store.read_into(key, offset, view[offset : offset + length])

    _all(one, len(ranges), concurrency)


def verify(entry: FileEntry, view: memoryview, *, where: str) -> None:
    """Compares a file in memory with its hashes.

    Raises:
        CorruptCheckpointError: A chunk differs.
    """
    ranges = entry.chunks

    def one(index: int) -> None:
        offset, length = ranges[index]
        entry.check_chunk(index, view[offset : offset + length], tier="memory", where=where)

    _all(one, len(ranges), _HASH_THREADS)


@contextlib.contextmanager
def temporary_file(size: int) -> Iterator[tuple[Path, memoryview]]:
    """A private file of ``size`` bytes, mapped for writing; removed if the block fails.

    Raises:
        RestoreError: No room for it.
    """
    descriptor, name = tempfile.mkstemp(prefix="tiered-checkpoint-", suffix=".ckpt")
    try:
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
            mapping = mmap.mmap(descriptor, max(size, 1))
        finally:
            os.close(descriptor)
        with mapping:
            with memoryview(mapping) as view, view[:size] as part:
                yield Path(name), part
            mapping.flush()
    except BaseException as error:
        os.unlink(name)
        if not isinstance(error, OSError) or isinstance(error, TieredCheckpointError):
            raise
        raise RestoreError(
            f"no room for {size} bytes: {error.strerror}",
            operation="restore",
            key=name,
            hint="give memory_dir, or the folder for temporary files, more space",
        ) from error


def _all(work: Callable[[int], None], count: int, concurrency: int) -> None:
    stop = threading.Event()

    def guarded(index: int) -> None:
        if stop.is_set():
            return
        try:
            work(index)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, min(concurrency, count)), thread_name_prefix="tiered-fetch") as pool:
        jobs = [pool.submit(guarded, index) for index in range(count)]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            # The first failure, or an interrupt, makes the rest pointless; those in flight end by
            # their own bounds.
            stop.set()
    for job in jobs:
        job.result()
