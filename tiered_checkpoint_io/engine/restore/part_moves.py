"""Whole parts, from the nodes that hold them to those that need them.

A node that has lost its copy of a checkpoint of one part gets it from one that has it. Of a checkpoint of many parts,
those whose nodes are lost get an owner again: the replicas that peers keep go to where they belong. A restart would
load from the replicas where they lie just as well. But then the next lost node might take the last copy of what the
first one had, and no node would upload what the lost one was to upload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.transfer import (
    Destination,
    GroupChannel,
    SlotDestination,
    find_part,
    receive_part,
    send_held_part,
    text_of,
)
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.errors import CorruptCheckpointError, LostRankError
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.model.manifest import Part

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Move:
    """A rank's part that goes from the node of one rank to that of another.

    ``source`` and ``target`` are the same where a replica only becomes the node's own.
    """

    part: int
    source: int
    target: int


def spread(holders: Sequence[int], lacking: Sequence[int]) -> list[Move]:
    """Which rank sends the one part of a checkpoint to which, in the order in which all ranks do it; pure.

    Those that have received it send it on, so that as many are sending at once as have it.
    """
    have, planned, rest = list(holders), list[Move](), list(lacking)
    while rest:
        turn = [Move(0, source, target) for source, target in zip(have, rest, strict=False)]
        planned += turn
        have += [move.target for move in turn]
        rest = rest[len(turn) :]
    return planned


def moves_to_owners(candidate: Candidate, nodes: Sequence[str]) -> list[Move]:
    """Where the replicas of parts go that no node owns, in the order in which all ranks do it; pure.

    A part goes to the node of the rank that it belongs to; where the job has another number of ranks, a node that
    has a replica becomes its owner.
    """
    count = candidate.content.parts
    owned = {rank for ranks in candidate.held.values() for rank, owns in ranks.items() if owns}
    load: Counter[int] = Counter()
    planned = []
    for part in range(count):
        holders = [node for node, ranks in candidate.held.items() if part in ranks]
        if part in owned or not holders:
            continue
        home = nodes[part] if len(nodes) == count else holders[0]
        if home in holders:
            leader = nodes.index(home)
            planned.append(Move(part, leader, leader))
            continue
        # Each rank of a holder's node can send: those that have sent least do.
        able = [rank for rank, node in enumerate(nodes) if node in holders]
        source = min(able, key=lambda rank: (load[rank], rank))
        load[source] += 1
        planned.append(Move(part, source, part))
    return planned


def move_parts(
    group: Group,
    tiers: Tiers,
    planned: Sequence[Move],
    parts: Mapping[int, Part],
    destination: Callable[[Part], Destination[_T]],
) -> _T | None:
    """Carries moves out, in the order in which all ranks do them; every rank calls this.

    Args:
        group: The ranks that load together.
        tiers: This node's memory, and where to log.
        planned: The moves, of which at most one brings a part to this rank.
        parts: The description of each part that can be sent.
        destination: Where to put what comes here: its answer is returned.

    Raises:
        CorruptCheckpointError: What was to come here did not arrive.
        LostRankError: The ranks lost each other.
    """
    received: _T | None = None
    failed: CorruptCheckpointError | None = None
    for move in planned:
        part = parts.get(move.part)
        if part is None or move.source == move.target:
            continue
        if move.source == group.rank:
            problem = send_held_part(GroupChannel(group, move.target), tiers.memory, part)
            if problem:
                tiers.log.error("rank %d did not get part %d of %s: %s", move.target, move.part, part.name, problem)
        elif move.target == group.rank:
            started = tiers.clock.monotonic()
            try:
                received = receive_part(GroupChannel(group, move.source), part, destination(part))
            except LostRankError:
                raise
            except Exception as error:
                # The moves that follow wait for this rank all the same.
                failed = CorruptCheckpointError(f"from rank {move.source}: {text_of(error)}", operation="restore")
                continue
            speed = rate(part.content.size, tiers.clock.monotonic() - started)
            tiers.log.info(
                "Step %d: received part %d of %s from rank %d: %s",
                part.content.step,
                move.part,
                part.name,
                move.source,
                speed,
            )
    if failed is not None:
        raise failed
    return received


def restore_owners(group: Group, tiers: Tiers, candidate: Candidate, nodes: Sequence[str]) -> None:
    """Carries out :func:`moves_to_owners`; every rank calls it. What fails is logged: the replicas are still there."""
    planned = moves_to_owners(candidate, nodes)
    if not planned:
        return
    drained = candidate.durable is not None
    found: dict[int, Part] = {}
    for move in planned:
        if move.source == group.rank:
            try:
                stored = find_part(tiers.memory, candidate.save_id, move.part)
                if move.target == group.rank and stored.is_replica:
                    tiers.memory.adopt(stored, drained=drained)
                found[move.part] = stored.part
            except Exception as error:
                # The others wait for what this rank has.
                tiers.log.warning("part %d of %s can't be sent: %s", move.part, candidate.name, text_of(error))
    parts: dict[int, Part] = {}
    for theirs in group.all_gather(found):
        parts.update(theirs)
    try:
        move_parts(group, tiers, planned, parts, lambda part: SlotDestination(tiers.memory, part, drained=drained))
    except CorruptCheckpointError as error:
        tiers.log.warning("a part of %s did not come back: %s", candidate.name, error)
    # All ranks of a node find there what one of them has received.
    group.all_gather(None)
