"""Pieces of files from the ranks that have them to those that lack them, all ranks at once.

All ranks know who has what and who lacks what, and plan alike, in rounds. In a round a rank sends one piece at most,
and receives one at most; what it has received it can send on in a later round. So many are sending as soon as many
have something, and all is done after about as many rounds as the rank with the most to send or to receive has pieces.

Each piece is verified where it arrives. After a bounded number of bytes all ranks meet and say what did not arrive: it
comes from another rank from then on, for as long as one has it. So no rank waits for the others longer than these
bytes take.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from tiered_checkpoint_io.engine.ranks.coordination import Group, portable, raise_first
from tiered_checkpoint_io.engine.ranks.transfer import STATUS_SIZE, status_of, text_in, text_of
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model.manifest import FileEntry

#: All ranks meet once a rank may have sent or received as many bytes.
_MEETING_BYTES = 1 << 30
#: Few pieces of one chunk are everywhere sooner. Where a rank lacks more than so many, planning would take too long.
_MANY = 128
_PIECE_BYTES = 64 << 20


class Piece(NamedTuple):
    """Some chunks of a file, one after the other; the basenames in one checkpoint differ."""

    basename: str
    offset: int
    length: int


class Move(NamedTuple):
    """A piece that a rank sends to another one."""

    piece: Piece
    source: int
    target: int


def in_pieces(
    entries: Mapping[str, FileEntry], lacking: Mapping[str, Mapping[int, frozenset[int]]]
) -> dict[Piece, frozenset[int]]:
    """The pieces in which files travel, and the ranks that lack each; pure.

    Args:
        entries: The files.
        lacking: By file and chunk, the ranks that lack it.
    """
    most = max(
        Counter(rank for chunks in lacking.values() for ranks in chunks.values() for rank in ranks).values(), default=0
    )
    pieces: dict[Piece, frozenset[int]] = {}
    for basename, chunks in lacking.items():
        entry = entries[basename]
        ranges, at_once = entry.chunks, min(most // _MANY, _PIECE_BYTES // entry.chunk_size) or 1
        last: Piece | None = None
        for index, ranks in sorted(chunks.items()):
            offset, length = ranges[index]
            piece = Piece(basename, offset, length)
            # Neighbours that the same ranks lack travel as one piece.
            is_next = last is not None and last.offset + last.length == offset and pieces[last] == ranks
            if last is not None and is_next and last.length < at_once * entry.chunk_size:
                del pieces[last]
                piece = Piece(basename, last.offset, last.length + length)
            pieces[piece] = ranks
            last = piece
    return pieces


class Rounds:
    """Who sends what to whom, round by round; the same on all ranks, which know the same of each other; pure."""

    def __init__(self, holders: Mapping[str, Collection[int]], lacking: Mapping[Piece, Collection[int]]) -> None:
        """Plans nothing yet.

        Args:
            holders: The ranks that have all of a file, by basename.
            lacking: The ranks that lack a piece, see :func:`in_pieces`.
        """
        #: Sets of pieces are integers: the bit of a piece is its place in this order.
        self._pieces = sorted(lacking)
        self._places = {piece: place for place, piece in enumerate(self._pieces)}
        self._have: Counter[int] = Counter()
        self._lack: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._turn = 0
        #: Files, and the ranks that are to receive nothing of them.
        self._gave_up: set[tuple[str, int]] = set()
        #: Files, and the ranks that are to send nothing of them.
        self.barred: set[tuple[str, int]] = set()
        #: How many ranks can send a piece, and the pieces by the number of digits of that.
        self._copies = [0] * len(self._pieces)
        self._levels: list[int] = [(1 << len(self._pieces)) - 1]
        for place, piece in enumerate(self._pieces):
            bit = 1 << place
            for rank in lacking[piece]:
                self._lack[rank] |= bit
                self._left[rank] += 1
            for rank in holders[piece.basename]:
                self._have[rank] |= bit
            self._count(bit, len(holders[piece.basename]))

    def next(self) -> list[Move]:
        """The next round; empty where nothing is left that some rank can send."""
        moves: list[Move] = []
        for target, source in self._pairs().items():
            pieces = self._lack[target] & self._have[source]
            rarest = next(each for each in (pieces & level for level in self._levels) if each)
            bit = rarest & -rarest
            self._lack[target] ^= bit
            self._left[target] -= 1
            # From now on it counts as less rare: others are to get something else.
            self._count(bit, 1)
            moves.append(Move(self._pieces[bit.bit_length() - 1], source, target))
        for move in moves:
            if (move.piece.basename, move.target) not in self.barred:
                self._have[move.target] |= self._bit(move.piece)
            else:
                self._count(self._bit(move.piece), -1)
        self._left = +self._left
        return moves

    def _pairs(self) -> dict[int, int]:
        """By target, the sources of the next round."""
        able = sorted(rank for rank, pieces in self._have.items() if pieces)
        # By turns, so that all get to send.
        first = self._turn % max(1, len(able))
        self._turn += 1
        free = able[first:] + able[:first]
        found: dict[int, int] = {}
        without: list[int] = []
        # Who lacks most has the most rounds to come, and is not to miss one.
        for target in sorted(self._left, key=lambda rank: (-self._left[rank], rank)):
            source = self._first(target, free)
            if source is None:
                without.append(target)
            else:
                found[target] = source
                free.remove(source)
        # Of thousands, the next round finds more; looking would take longer than that.
        for target in without if free and len(without) * len(found) < _MANY**2 else ():
            # Another one may do with a rank that is still free, and leave its own.
            for other, source in found.items():
                instead = self._first(other, free) if self._lack[target] & self._have[source] else None
                if instead is not None:
                    found[target], found[other] = source, instead
                    free.remove(instead)
                    break
        return found

    def _first(self, target: int, sources: Iterable[int]) -> int | None:
        """The first of some ranks that has something which a rank lacks."""
        lacks = self._lack[target]
        return next((source for source in sources if lacks & self._have[source]), None)

    def miss(self, missed: Collection[Move], told: Collection[Move] = ()) -> None:
        """Takes back moves, all that failed since the last time: another rank is to send these pieces.

        A rank that did not send a piece, or not intact, sends nothing of that file any more. One that ought to have
        sent on what it did not get itself is not to blame. Nor are those whose receiver is: it gives the file up.

        Args:
            missed: The moves.
            told: Those of them whose source has said itself that it can't send.
        """
        without = {(move.piece, move.target) for move in missed}
        for move in missed:
            bit = self._bit(move.piece)
            self._lose(move.target, bit)
            self._lack[move.target] |= bit
            self._left[move.target] += 1
        pairs = {(piece.basename, source, to) for piece, source, to in missed if (piece, source) not in without}
        spoiling = self._spoiling(pairs - {(piece.basename, source, to) for piece, source, to in told})
        self._gave_up |= spoiling
        for basename, target in spoiling:
            lacks = self._lack[target] & self._bits(basename)
            self._lack[target] ^= lacks
            self._left[target] -= lacks.bit_count()
        self._left = +self._left
        blamed = spoiling | {(basename, source) for basename, source, to in pairs if (basename, to) not in spoiling}
        self.barred |= blamed
        for basename, rank in blamed:
            for piece in self._pieces:
                if piece.basename == basename:
                    self._lose(rank, self._bit(piece))

    def _spoiling(self, pairs: Collection[tuple[str, int, int]]) -> set[tuple[str, int]]:
        """Files, and the ranks that spoil what they receive of them, by what came from which source to which target.

        Such a rank misses it from several sources, from each of which fewer ranks miss it than it has such sources.
        Where no other rank lacks that file, all sources are tried.
        """
        sources: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        targets: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        for basename, source, target in pairs:
            sources[basename, target].add(source)
            targets[basename, source].add(target)
        found = set()
        for (basename, target), those in sources.items():
            sound = sum(len(targets[basename, source]) < len(those) for source in those)
            bits = self._bits(basename) if sound > 1 else 0
            if any(self._lack[rank] & bits for rank in self._left if rank != target):
                found.add((basename, target))
        # Without these, others may stand out.
        rest = {pair for pair in pairs if (pair[0], pair[2]) not in found}
        return found | self._spoiling(rest) if found else found

    def missing(self, rank: int) -> set[str]:
        """The files of which a rank lacks something."""
        return {basename for basename, who in self._gave_up if who == rank} | {
            piece.basename for piece in self._lacks(rank)
        }

    def longest(self, rank: int) -> int:
        """The bytes of the longest piece that a rank lacks."""
        return max((piece.length for piece in self._lacks(rank)), default=0)

    def _lacks(self, rank: int) -> list[Piece]:
        return [piece for piece in self._pieces if self._lack[rank] & self._bit(piece)]

    def _bit(self, piece: Piece) -> int:
        return 1 << self._places[piece]

    def _bits(self, basename: str) -> int:
        first = bisect_left(self._pieces, (basename,))
        end = bisect_left(self._pieces, (basename, math.inf), first)
        return (1 << end) - (1 << first)

    def _lose(self, rank: int, bit: int) -> None:
        if self._have[rank] & bit:
            self._have[rank] ^= bit
            self._count(bit, -1)

    def _count(self, bit: int, more: int) -> None:
        place = bit.bit_length() - 1
        copies = self._copies[place] = self._copies[place] + more
        before, now = (copies - more).bit_length(), copies.bit_length()
        if now != before:
            self._levels += [0] * (now + 1 - len(self._levels))
            self._levels[before] ^= bit
            self._levels[now] |= bit


class Pieces(Protocol):
    """The pieces of one rank."""

    def read(self, piece: Piece) -> memoryview:
        """One that this rank has. Where it raises, the rank that was to get it learns why."""
        ...

    def room(self, piece: Piece) -> memoryview:
        """Where one that arrives is put; never fails."""
        ...

    def take(self, piece: Piece) -> None:
        """Verifies what is in its room, and has it from now on.

        Raises:
            CorruptCheckpointError: It did not arrive as it should; another error ends the load on all ranks.
        """
        ...

    def suspect(self, piece: Piece) -> None:
        """Looks at one again that this rank has sent, and that did not arrive as it should."""
        ...


def carry(group: Group, rounds: Rounds, pieces: Pieces) -> list[str]:
    """Carries out all rounds; every rank of ``group`` calls this.

    Returns:
        What did not arrive here as it should, for each file and source once. See :meth:`Rounds.missing` for what has
        not come from elsewhere either.

    Raises:
        RestoreError: The ranks lost each other.
        TieredCheckpointError: Some rank could not keep what arrived.
    """
    notes: dict[tuple[str, int], str] = {}
    failed: Exception | None = None
    while True:
        missed, told, travelled = list[Move](), list[Move](), 0
        moves = rounds.next()
        if not moves:
            return list(notes.values())
        while moves:
            sent = next((move for move in moves if move.source == group.rank), None)
            received = next((move for move in moves if move.target == group.rank), None)
            problem = _transfer(group, pieces, sent, received)
            if received is not None:
                try:
                    if problem:
                        raise CorruptCheckpointError(problem, operation="restore", key=received.piece.basename)
                    pieces.take(received.piece)
                except CorruptCheckpointError as error:
                    missed.append(received)
                    told += [received] if problem else []
                    note = str(error) if problem else f"from rank {received.source}: {error}"
                    notes.setdefault((received.piece.basename, received.source), note)
                except Exception as error:
                    # Others count on this rank until all meet.
                    failed = failed or error
            travelled += max(move.piece.length for move in moves)
            moves = rounds.next() if travelled < _MEETING_BYTES else []
        gathered: list[tuple[list[Move], list[Move], Exception | None]] = group.all_gather(
            (missed, told, portable(failed, group.rank))
        )
        raise_first((error for _, _, error in gathered), failed)
        everywhere = [move for theirs, _, _ in gathered for move in theirs]
        for move in everywhere:
            if move.source == group.rank:
                pieces.suspect(move.piece)
        rounds.miss(everywhere, [move for _, theirs, _ in gathered for move in theirs])


def _transfer(group: Group, pieces: Pieces, sent: Move | None, received: Move | None) -> str:
    """Sends and receives what a round has for this rank; why nothing came where the other side could not send."""
    chunk, problem = memoryview(b""), ""
    if sent is not None:
        try:
            chunk = pieces.read(sent.piece)
        except Exception as error:
            problem = text_of(error)
    status = memoryview(bytearray(STATUS_SIZE))
    group.transfer(
        (status_of(problem), sent.target) if sent is not None else None,
        (status, received.source) if received is not None else None,
    )
    answer = text_in(status) if received is not None else ""
    group.transfer(
        (chunk, sent.target) if sent is not None and not problem else None,
        (pieces.room(received.piece), received.source) if received is not None and not answer else None,
    )
    return f"rank {received.source} could not send it: {answer}" if received is not None and answer else ""
