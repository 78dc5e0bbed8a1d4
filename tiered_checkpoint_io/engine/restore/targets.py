"""Bytes of a file, read straight to their targets: each chunk is read once, in pieces, and hashed while in cache.

A *target* is ``(offset in the file, buffer)``. A target gets its bytes before the chunk's hash is known: if the hash
differs, the targets have undefined content, and are filled from another source, or the restore fails.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tiered_checkpoint_io.engine.chunks import PIECE_SIZE, chunks_of, fetch_pieces
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model.documents import new_hash
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Readable

Target = tuple[int, memoryview]
#: A piece of a chunk: its offset in the file, its length, and its target; None for bytes that are only hashed.
Piece = tuple[int, int, memoryview | None]

#: Linux takes 1,024 buffers in one call.
_MOST = 512


def by_chunk(entry: FileEntry, targets: Collection[tuple[int, Any]]) -> dict[int, list[tuple[int, Any]]]:
    """Returns the chunks that targets lie in, and the parts of targets in each, in the order of the file.

    Args:
        entry: The file.
        targets: Disjoint, in any order; instead of a buffer, any object that has a length and slices as one.

    Raises:
        CorruptCheckpointError: A target reaches beyond the file.
    """
    found: defaultdict[int, list[tuple[int, Any]]] = defaultdict(list)
    for offset, buffer in sorted(targets, key=lambda target: target[0]):
        for index in chunks_of(entry, [(offset, len(buffer))]):
            start = index * entry.chunk_size
            low, high = max(offset, start), min(offset + len(buffer), start + entry.chunk_size)
            found[index].append((low, buffer[low - offset : high - offset]))
    return found


def pieces_of(offset: int, length: int, targets: Sequence[Target]) -> list[Piece]:
    """Returns the pieces of ``length`` bytes from ``offset`` on, at most :data:`PIECE_SIZE` long, with ``targets``."""
    pieces: list[Piece] = []
    at, end = offset, offset + length
    for start, buffer in (*targets, (end, memoryview(b""))):
        pieces += [(low, min(PIECE_SIZE, start - low), None) for low in range(at, start, PIECE_SIZE)]
        for low in range(0, len(buffer), PIECE_SIZE):
            piece = buffer[low : low + PIECE_SIZE]
            pieces.append((start + low, len(piece), piece))
        at = start + len(buffer)
    return pieces


def read_chunk(entry: FileEntry, index: int, descriptor: int, targets: Sequence[Target], *, where: str | None) -> None:
    """Reads the targets' part of a chunk of a file in memory, and verifies the chunk as it arrives.

    The file is read, not mapped: page faults and the end of the mapping would take a third of the time.

    Args:
        entry: The file.
        index: Chunk's number.
        descriptor: The file, open.
        targets: Pieces of this chunk that are needed, by :func:`by_chunk`.
        where: The file's place, for errors; None if the chunk was verified before.

    Raises:
        CorruptCheckpointError: The chunk differs from its hash, or the file is short.
    """
    if where is None:
        for offset, buffer in targets:
            _read(entry, descriptor, offset, [buffer])
        return
    digest = new_hash()
    pieces = pieces_of(*entry.chunks[index], targets)
    offset = pieces[0][0] if pieces else 0
    for batch in _batches(pieces):
        _read(entry, descriptor, offset, batch)
        for buffer in batch:
            # The received bytes, not the stored ones.
            digest.update(buffer)
            offset += len(buffer)
    entry.check_digest(index, digest.hexdigest(), tier="memory", where=where)


def fetch_targets(store: Readable, entry: FileEntry, index: int, targets: Sequence[Target]) -> None:
    """Reads a chunk of the durable tier, each byte once, and fills targets with their part; raises as ``fetch``."""
    pieces = pieces_of(*entry.chunks[index], targets)
    aside = memoryview(bytearray(max((length for _, length, to in pieces if to is None), default=0)))
    fetch_pieces(store, entry, index, [aside[:length] if to is None else to for _, length, to in pieces])


def _batches(pieces: Sequence[Piece]) -> Iterator[list[memoryview]]:
    """Yields the buffers of pieces, as many at once as fit into the cache and into one call."""
    gaps = sum(length for _, length, to in pieces if to is None)
    aside = memoryview(bytearray(min(gaps, PIECE_SIZE)))
    batch: list[memoryview] = []
    size = used = 0
    for _, length, to in pieces:
        if batch and (size + length > PIECE_SIZE or len(batch) == _MOST):
            yield batch
            batch, size, used = [], 0, 0
        batch.append(aside[used : used + length] if to is None else to)
        used += length if to is None else 0
        size += length
    if batch:
        yield batch


def _read(entry: FileEntry, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fills buffers, one after the other, with bytes from ``offset`` on."""
    left = list(buffers)
    while left:
        count = os.preadv(descriptor, left, offset)
        if not count and any(left):
            raise CorruptCheckpointError("the file is short", operation="restore", tier="memory", key=entry.path)
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
