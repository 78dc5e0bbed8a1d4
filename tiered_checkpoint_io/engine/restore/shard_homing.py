"""Parts whose nodes are lost get an owner again: the copies of them that peers keep go to where they belong.

A restart would load from the copies where they lie just as well. But then the next lost node might take the last
copy of what the first one had, and nobody would bring to the durable tier what the lost node was to bring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.transfer import (
    GroupChannel,
    SlotPlace,
    find_part,
    receive_part,
    send_held_part,
    text_of,
)
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.errors import LostRankError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.manifest import Part


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of the copies of a part that no node owns.

    Attributes:
        part: Whose part it is.
        source: The rank that has a copy.
        target: The rank whose node is to own it; the same where the copy only changes its place.
    """

    part: int
    source: int
    target: int


def moves(candidate: Candidate, nodes: Sequence[str]) -> list[Move]:
    """What has to move, in the order in which all ranks do it; pure.

    A part goes to the node of the rank that it belongs to; where the job has another number of ranks, a node that
    has a replica becomes its owner.

    Args:
        candidate: The checkpoint, and which nodes' memory has parts of it.
        nodes: The node of each rank.
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


def restore_owners(group: Group, tier: MemoryTier, logger: Logger, candidate: Candidate, nodes: Sequence[str]) -> None:
    """Carries :func:`moves` out; every rank calls this. What fails is logged: the replicas are still there.

    Args:
        group: The ranks that load together.
        tier: This node's memory.
        logger: Where to log.
        candidate: The checkpoint.
        nodes: The node of each rank.

    Raises:
        LostRankError: The ranks lost each other.
    """
    planned = moves(candidate, nodes)
    if not planned:
        return
    drained = candidate.durable is not None
    found: dict[int, Part] = {}
    for move in planned:
        if move.source == group.rank:
            try:
                stored = find_part(tier, candidate.save_id, move.part)
                if move.target == group.rank and stored.is_replica:
                    tier.adopt(stored, drained=drained)
                found[move.part] = stored.part
            except Exception as error:
                # The others wait to hear what this rank has.
                logger.warning("rank %d's part of %s can't be sent: %s", move.part, candidate.name, text_of(error))
    described: dict[int, Part] = {}
    for theirs in group.all_gather(found):
        described.update(theirs)
    for move in planned:
        part = described.get(move.part)
        if part is None or move.source == move.target:
            continue
        if move.source == group.rank:
            problem = send_held_part(GroupChannel(group, move.target), tier, part)
            if problem:
                logger.error("rank %d's part of %s did not get to it: %s", move.part, candidate.name, problem)
        elif move.target == group.rank:
            _receive(group, tier, logger, part, move, drained=drained)
    # All ranks of a node find there what one of them has received.
    group.all_gather(None)


def _receive(group: Group, tier: MemoryTier, logger: Logger, part: Part, move: Move, *, drained: bool) -> None:
    try:
        receive_part(GroupChannel(group, move.source), part, SlotPlace(tier, part, drained=drained))
        logger.info("Step %d: rank %d's part of %s is back from a peer", part.content.step, move.part, part.name)
    except LostRankError:
        raise
    except Exception as error:
        logger.warning("rank %d's part of %s did not come back from a peer: %s", move.part, part.name, text_of(error))
