"""Hashes of bytes: in chunks, each on its own. Pure."""

from __future__ import annotations

import xxhash

#: Bytes hashed as one unit: small enough to be read in ranges by many threads at once, large
#: enough that a manifest stays small.
MIN_CHUNK_SIZE = 16 << 20
_MAX_CHUNKS = 16_384


def chunk_size_for(size: int) -> int:
    """Returns the chunk size for a file of ``size`` bytes: 16 MiB, doubled until 16,384 chunks suffice."""
    chunk_size = MIN_CHUNK_SIZE
    while size > chunk_size * _MAX_CHUNKS:
        chunk_size *= 2
    return chunk_size


def chunk_ranges(size: int, chunk_size: int) -> list[tuple[int, int]]:
    """Returns ``(offset, length)`` of each chunk of a file of ``size`` bytes; one empty chunk for 0 bytes."""
    if size == 0:
        return [(0, 0)]
    return [(offset, min(chunk_size, size - offset)) for offset in range(0, size, chunk_size)]


def new_hash() -> xxhash.xxh3_128:
    """Returns an xxh3-128 that is given its bytes piece by piece; ``hexdigest`` is as :func:`hash_bytes` has it."""
    return xxhash.xxh3_128()


def hash_bytes(data: memoryview | bytes) -> str:
    """Returns xxh3-128 of ``data``, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)
