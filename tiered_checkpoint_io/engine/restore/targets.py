"""Bytes of a file straight to where they are needed: each chunk is read once, in pieces, and hashed while in cache.

A *target* is ``(offset in the file, buffer)``. It has its bytes before the chunk's hash is known: where that differs,
the targets hold anything, and have to be filled from another source, or the restore fails.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Collection, Sequence

from tiered_checkpoint_io.engine.chunks import PIECE_SIZE, chunks_of, fetch_pieces
from tiered_checkpoint_io.engine.ranks.views import address_of
from tiered_checkpoint_io.model.hashing import new_hash
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store

Target = tuple[int, memoryview]
#: A piece of a chunk: where it begins in the file, how long it is, and where it goes; None for what is only hashed.
Piece = tuple[int, int, memoryview | None]

#: From here on a copy is worth leaving the interpreter's lock to others.
_LARGE = 64 << 10


def by_chunk(entry: FileEntry, targets: Collection[Target]) -> dict[int, list[Target]]:
    """The chunks that targets lie in, and what of the targets lies in each, in the order of the file.

    Args:
        entry: The file.
        targets: Disjoint, in any order.

    Raises:
        CorruptCheckpointError: A target reaches beyond the file.
    """
    found: defaultdict[int, list[Target]] = defaultdict(list)
    for offset, buffer in sorted(targets, key=lambda target: target[0]):
        for index in chunks_of(entry, [(offset, len(buffer))]):
            start = index * entry.chunk_size
            low, high = max(offset, start), min(offset + len(buffer), start + entry.chunk_size)
            found[index].append((low, buffer[low - offset : high - offset]))
    return found


def pieces_of(offset: int, length: int, targets: Sequence[Target]) -> list[Piece]:
    """The pieces of ``length`` bytes from ``offset`` on, of :data:`PIECE_SIZE` at most, with ``targets`` among them."""
    pieces: list[Piece] = []
    at, end = offset, offset + length
    for start, buffer in (*targets, (end, memoryview(b""))):
        pieces += [(low, min(PIECE_SIZE, start - low), None) for low in range(at, start, PIECE_SIZE)]
        for low in range(0, len(buffer), PIECE_SIZE):
            piece = buffer[low : low + PIECE_SIZE]
            pieces.append((start + low, len(piece), piece))
        at = start + len(buffer)
    return pieces


def copy_chunk(entry: FileEntry, index: int, view: memoryview, targets: Sequence[Target], *, where: str | None) -> None:
    """Copies what targets need of a chunk of a file in memory, and verifies the chunk as it arrives.

    Args:
        entry: The file.
        index: Which chunk.
        view: All bytes of the file.
        targets: What is needed of this chunk, as :func:`by_chunk` gives it.
        where: Of the file, for errors; None where the chunk was verified before.

    Raises:
        CorruptCheckpointError: The chunk differs from its hash.
    """
    if where is None:
        for offset, buffer in targets:
            _copy(view, offset, buffer)
        return
    digest = new_hash()
    for offset, length, to in pieces_of(*entry.chunks[index], targets):
        if to is None:
            digest.update(view[offset : offset + length])
        else:
            _copy(view, offset, to)
            # What has arrived, not what was sent.
            digest.update(to)
    entry.check_digest(index, digest.hexdigest(), tier="memory", where=where)


def fetch_targets(store: Store, entry: FileEntry, index: int, targets: Sequence[Target]) -> None:
    """Reads a chunk of the durable tier, each byte once, and leaves in targets what they need; raises as ``fetch``."""
    aside = memoryview(bytearray(PIECE_SIZE))
    pieces = pieces_of(*entry.chunks[index], targets)
    fetch_pieces(store, entry, index, [aside[:length] if to is None else to for _, length, to in pieces])


def _copy(view: memoryview, offset: int, buffer: memoryview) -> None:
    if len(buffer) < _LARGE:
        buffer[:] = view[offset : offset + len(buffer)]
    else:
        ctypes.memmove(address_of(buffer), address_of(view) + offset, len(buffer))
