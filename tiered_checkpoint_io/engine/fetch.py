"""Bytes from the durable tier into node memory, each range verified as it arrives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from tiered_checkpoint_io.manifest import FileEntry
from tiered_checkpoint_io.storage.base import Store

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

    def one(index: int) -> None:
        offset, length = entry.chunks[index]
        target = view[offset : offset + length]
        store.read_into(entry.path, offset, target)
        entry.check_chunk(index, target, tier="durable", where=f"{store.url}/{entry.path}")

    _all(one, len(entry.hashes), concurrency)


def verify(entry: FileEntry, view: memoryview, *, where: str) -> None:
    """Compares a file in memory with its hashes.

    Raises:
        CorruptCheckpointError: A chunk differs.
    """

    def one(index: int) -> None:
        offset, length = entry.chunks[index]
        entry.check_chunk(index, view[offset : offset + length], tier="memory", where=where)

    _all(one, len(entry.hashes), _HASH_THREADS)


def _all(work: Callable[[int], None], count: int, concurrency: int) -> None:
    with ThreadPoolExecutor(max(1, min(concurrency, count)), thread_name_prefix="tiered-fetch") as pool:
        jobs = [pool.submit(work, index) for index in range(count)]
        wait(jobs, return_when=FIRST_EXCEPTION)
        for job in jobs:
            # The first failure makes the rest pointless; those in flight end by their own bounds.
            job.cancel()
        for job in jobs:
            if not job.cancelled():
                job.result()
