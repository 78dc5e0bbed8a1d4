"""Reading the chunks of a file, each verified as it is read: in memory, or from the durable tier into memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from tiered_checkpoint_io.errors import RestoreError, TieredCheckpointError
from tiered_checkpoint_io.model.hashing import chunk_size_for
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store

#: xxh3 at full speed saturates memory with few threads.
_HASH_THREADS = 4


def unverified(key: str, size: int) -> FileEntry:
    """A file of which no hashes are known, to be read as others are."""
    return FileEntry(key, size, chunk_size_for(size), ())


def fetch(store: Store, entry: FileEntry, view: memoryview, *, concurrency: int) -> None:
    """Reads a file by ranged requests, one for each chunk, and verifies what has a hash.

    Args:
        store: Where from.
        entry: Which file; see :func:`unverified` for one without hashes.
        view: Where to: ``entry.size`` writable bytes.
        concurrency: Requests in flight at once.

    Raises:
        CorruptCheckpointError: The object is short, or a chunk differs from its hash.
        StoreError: It could not be read.
    """
    where = f"{store.url}/{entry.path}"
    ranges = entry.chunks

    def one(index: int) -> None:
        offset, length = ranges[index]
        target = view[offset : offset + length]
        store.read_into(entry.path, offset, target)
        if entry.hashes:
            entry.check_chunk(index, target, tier="durable", where=where)

    _all(one, range(len(ranges)), concurrency)


def verify(entry: FileEntry, view: memoryview, *, where: str, indices: Iterable[int] | None = None) -> None:
    """Compares a file in memory with its hashes.

    Args:
        entry: Which file.
        view: Its bytes.
        where: For errors.
        indices: Which chunks; all of them where it is None.

    Raises:
        CorruptCheckpointError: A chunk differs.
    """
    ranges = entry.chunks

    def one(index: int) -> None:
        offset, length = ranges[index]
        entry.check_chunk(index, view[offset : offset + length], tier="memory", where=where)

    _all(one, range(len(ranges)) if indices is None else indices, _HASH_THREADS)


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


def _all(work: Callable[[int], None], indices: Iterable[int], concurrency: int) -> None:
    stop = threading.Event()

    def guarded(index: int) -> None:
        if stop.is_set():
            return
        try:
            work(index)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, concurrency), thread_name_prefix="tiered-fetch") as pool:
        jobs = [pool.submit(guarded, index) for index in indices]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            # The first failure, or an interrupt, makes the rest pointless; those in flight end by
            # their own bounds.
            stop.set()
    for job in jobs:
        job.result()
