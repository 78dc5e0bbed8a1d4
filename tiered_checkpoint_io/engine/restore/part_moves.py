"""Whole parts, from the nodes that hold them to those that need them.

A node that has lost its copy of a checkpoint of one part gets it from one that has it. Of a checkpoint of many parts,
those whose nodes are lost get an owner again: the replicas that peers keep go to where they belong. A restart would
load from the replicas where they lie just as well. But then the next lost node might take the last copy of what the
first one had, and no node would upload what the lost one was to upload.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tiered_checkpoint_io.engine.chunks import chunks_of, verify
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.rounds import Piece, Rounds, carry, in_pieces
from tiered_checkpoint_io.engine.ranks.transfer import (
    Destination,
    SlotDestination,
    find_part,
    quarantine_damaged,
    text_of,
)
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.memory.parts import StoredPart, reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.manifest import FileEntry, Part

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PartMove:
    """A rank's part that goes to the node of a rank, and the ranks that can send it.

    The target is the only one of these where a replica only becomes the node's own.
    """

    part: int
    target: int
    sources: tuple[int, ...]


def moves_to_owners(candidate: Candidate, nodes: Sequence[str]) -> list[PartMove]:
    """Where the replicas of parts go that no node owns; pure.

    A part goes to the node of the rank that it belongs to; where the job has another number of ranks, a node that
    has a replica becomes its owner.
    """
    count = candidate.content.parts
    owned = {rank for ranks in candidate.held.values() for rank, owns in ranks.items() if owns}
    planned = []
    for part in range(count):
        holders = [node for node, ranks in candidate.held.items() if part in ranks]
        if part in owned or not holders:
            continue
        home = nodes[part] if len(nodes) == count else holders[0]
        if home in holders:
            leader = nodes.index(home)
            planned.append(PartMove(part, leader, (leader,)))
        else:
            # Each rank of a holder's node can send.
            able = tuple(rank for rank, node in enumerate(nodes) if node in holders)
            planned.append(PartMove(part, part, able))
    return planned


def move_parts(
    group: Group,
    tiers: Tiers,
    planned: Sequence[PartMove],
    parts: Mapping[int, Part],
    destination: Callable[[Part], Destination[_T]],
) -> Callable[[], _T | None]:
    """Carries moves out; every rank calls this.

    Args:
        group: The ranks that load together.
        tiers: This node's memory, and where to log.
        planned: The moves, of which at most one brings a part to this rank.
        parts: The description of each part that is moved.
        destination: Where to put what comes here.

    Returns:
        What gives the destination's answer where a part has come here. It raises CorruptCheckpointError where one
        was to come and has not.

    Raises:
        TieredCheckpointError: Some rank failed, or the ranks lost each other.
    """
    part = next((parts[move.part] for move in planned if move.target == group.rank), None)
    place = destination(part) if part is not None else None
    started = tiers.clock.monotonic()
    try:
        with contextlib.closing(_Parts(tiers.memory, parts)) as mine:
            if place is not None:
                mine.open(place)
            # Where there is no room, nothing is sent.
            has_room: list[bool] = group.all_gather(not mine.problem)
            rounds = _rounds([move for move in planned if has_room[move.target]], parts)
            notes = carry(group, rounds, mine)
    except BaseException:
        if place is not None:
            place.drop()
        raise

    def result() -> _T | None:
        if part is None or place is None:
            return None
        try:
            if mine.problem or rounds.missing(group.rank):
                why = mine.problem or "; ".join(notes) or "no rank has sent all of it intact"
                raise CorruptCheckpointError(why, operation="restore", key=part.name)
            kept = place.keep()
        except CorruptCheckpointError:
            place.drop()
            raise
        except Exception as error:
            place.drop()
            raise CorruptCheckpointError(text_of(error), operation="restore", key=part.name) from error
        for note in notes:
            tiers.skipped(f"{part.name}: {note}")
        speed, step = rate(part.content.size, tiers.clock.monotonic() - started), part.content.step
        tiers.log.info("Step %d: received part %d of %s from other nodes: %s", step, part.rank, part.name, speed)
        return kept

    return result


def _rounds(planned: Sequence[PartMove], parts: Mapping[int, Part]) -> Rounds:
    holders: dict[str, tuple[int, ...]] = {}
    entries: dict[str, FileEntry] = {}
    lacking: dict[str, dict[int, frozenset[int]]] = {}
    for number in sorted({move.part for move in planned}):
        moves = [move for move in planned if move.part == number]
        targets = frozenset(move.target for move in moves)
        for entry in parts[number].content.files:
            holders[entry.basename], entries[entry.basename] = moves[0].sources, entry
            lacking[entry.basename] = dict.fromkeys(chunks_of(entry, [(0, entry.size)]), targets)
    return Rounds(holders, in_pieces(entries, lacking))


class _Parts:
    """The pieces of parts that lie in this node's memory, and of the one that arrives here.

    Attributes:
        problem: Why this rank can't take any more; empty where it can.
    """

    def __init__(self, memory: MemoryTier, parts: Mapping[int, Part]) -> None:
        self.problem = ""
        self._memory = memory
        self._whose = {entry.basename: (part, entry) for part in parts.values() for entry in part.content.files}
        self._held = contextlib.ExitStack()
        self._arriving: Mapping[str, memoryview] = {}
        self._sent: dict[int, tuple[StoredPart, Mapping[str, memoryview]]] = {}

    def open(self, place: Destination[object]) -> None:
        """Makes room for what arrives."""
        try:
            self._arriving = self._held.enter_context(place.open())
        except Exception as error:
            self.problem = text_of(error)

    def close(self) -> None:
        """Lets all views go."""
        self._held.close()

    def read(self, piece: Piece) -> memoryview:
        if self.problem:
            raise CorruptCheckpointError(self.problem, operation="restore", key=piece.basename)
        views, (part, _) = self._arriving, self._whose[piece.basename]
        if piece.basename not in views:
            if part.rank not in self._sent:
                stored = find_part(self._memory, part.save_id, part.rank)
                self._sent[part.rank] = stored, self._held.enter_context(reading(stored))
            views = self._sent[part.rank][1]
        return views[piece.basename][piece.offset : piece.offset + piece.length]

    def room(self, piece: Piece) -> memoryview:
        return self._arriving[piece.basename][piece.offset : piece.offset + piece.length]

    def take(self, piece: Piece) -> None:
        _, entry = self._whose[piece.basename]
        try:
            verify(entry, self._arriving[piece.basename], where="peer", indices=chunks_of(entry, [piece[1:]]))
        except CorruptCheckpointError:
            raise
        except Exception as error:
            # The others do without this rank.
            self.problem = self.problem or text_of(error)

    def suspect(self, piece: Piece) -> None:
        stored, _ = self._sent.pop(self._whose[piece.basename][0].rank, (None, None))
        if stored is not None:
            quarantine_damaged(self._memory, stored)


def restore_owners(group: Group, tiers: Tiers, candidate: Candidate, nodes: Sequence[str]) -> None:
    """Carries out :func:`moves_to_owners`; every rank calls it. What fails is logged: the replicas are still there."""
    planned = moves_to_owners(candidate, nodes)
    if not planned:
        return
    drained = candidate.durable is not None
    found: dict[int, Part] = {}
    for move in planned:
        if group.rank in move.sources:
            try:
                stored = find_part(tiers.memory, candidate.save_id, move.part)
                if move.target == group.rank and stored.is_replica:
                    tiers.memory.adopt(stored, drained=drained)
                if move.target not in move.sources:
                    found[move.part] = stored.part
            except Exception as error:
                # The others wait for what this rank has.
                tiers.log.warning("part %d of %s can't be sent: %s", move.part, candidate.name, text_of(error))
    able: defaultdict[int, list[int]] = defaultdict(list)
    for rank, numbers in enumerate(group.all_gather(list(found))):
        for number in numbers:
            able[number].append(rank)
    moves = [replace(move, sources=tuple(able[move.part])) for move in planned if move.part in able]
    if moves:
        # A description has a hash of each chunk. One rank describes what several can send.
        parts = group.combine({number: part for number, part in found.items() if able[number][0] == group.rank})
        result = move_parts(
            group, tiers, moves, parts, lambda part: SlotDestination(tiers.memory, part, drained=drained)
        )
        try:
            result()
        except CorruptCheckpointError as error:
            tiers.log.warning("a part of %s did not come back: %s", candidate.name, error)
    # All ranks of a node find there what one of them has received.
    group.all_gather(None)
