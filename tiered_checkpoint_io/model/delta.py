"""Delta uploads: which bytes of a file the durable tier has already, and how an upload is cut for it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.model.s3_limits import MAX_PARTS, MIN_PART


class Same(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file, which the object ``key`` has from byte ``offset`` on."""

    start: int
    stop: int
    key: str
    offset: int


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file: sent, or copied from byte ``offset`` of the object ``key`` on."""

    start: int
    stop: int
    key: str = ""
    offset: int = 0


def same_ranges(entry: FileEntry, earlier: Iterable[FileEntry]) -> tuple[Same, ...]:
    """The ranges of a file whose chunks have the hashes of chunks of earlier files, in their order."""
    held: dict[tuple[str, int], tuple[str, int]] = {}
    anywhere: dict[tuple[str, int], tuple[str, int]] = {}
    paths = []
    for file in earlier:
        paths.append(file.path)
        for digest, (offset, length) in zip(file.hashes, file.chunks, strict=True):
            held[file.path, offset] = (digest, length)
            anywhere.setdefault((digest, length), (file.path, offset))
    found: list[Same] = []
    for digest, (start, length) in zip(entry.hashes, entry.chunks, strict=True):
        content = (digest, length)
        last = found[-1] if found and found[-1].stop == start else None
        # What goes on with the range before it makes the fewest requests.
        following = (last.key, last.offset + start - last.start) if last is not None else None
        places = (following, *((path, start) for path in paths), anywhere.get(content))
        place = next((each for each in places if each is not None and held.get(each) == content), None)
        if place is None or not length:
            continue
        if last is not None and place == following:
            found[-1] = last._replace(stop=start + length)
        else:
            found.append(Same(start, start + length, *place))
    return tuple(found)


def pieces_of(size: int, same: Sequence[Same], part_size: int, copy_size: int) -> tuple[Piece, ...]:
    """The parts of an upload of ``size`` bytes: as few bytes as possible are sent, within S3's limits.

    Args:
        size: Bytes of the file.
        same: What need not be sent, in its order.
        part_size: Bytes of one part that is sent: at least 8 MiB, and such that 10,000 suffice for the file.
        copy_size: The same of one that is copied.
    """
    shortest = MIN_PART
    while True:
        pieces = _cut(size, [each for each in same if each.stop - each.start >= shortest], part_size, copy_size)
        if len(pieces) <= MAX_PARTS:
            return pieces
        shortest *= 2


def _cut(size: int, same: Sequence[Same], part_size: int, copy_size: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    at = 0
    for each in same:
        begin = max(at, each.start)
        if at < begin < at + MIN_PART:
            # What changed is too short for a part: the beginning of what did not is sent with it.
            begin = at + MIN_PART
        if each.stop - begin < MIN_PART:
            continue
        pieces += [Piece(*span) for span in _split(at, begin, part_size)]
        for start, stop in _split(begin, each.stop, copy_size):
            pieces.append(Piece(start, stop, each.key, each.offset + start - each.start))
        at = each.stop
    return (*pieces, *(Piece(*span) for span in _split(at, size, part_size)))


def _split(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """A range in about equal parts of at most so many bytes, or slightly more where one would be too short."""
    length = stop - start
    count = -(-length // most)
    if count > 1 and length // count < MIN_PART:
        count -= 1
    cuts = [start + length * index // max(1, count) for index in range(count + 1)]
    return list(itertools.pairwise(cuts))
