"""Room for a save: in the queues for the durable tier, in node memory and in the spill; and the logs about it.

A save is queued for the durable tier if the queue of each of its nodes has room for one more. A coordinator sees only
the queue of its own node. So each other rank of a coordinated save looks at its own node's queue, and votes; the votes
reach the coordinator with the ranks' DCP plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.spill import AUTO
from tiered_checkpoint_io.model import ids

#: Votes that this thread has unpickled; plans may be replaced: see :func:`facts.arrived`.
_arrivals = threading.local()


@dataclass(frozen=True, slots=True)
class Vote:
    """Answer of a rank about its node, before a save that is to go to the durable tier.

    Attributes:
        free: True if its queue has room for one more.
        given_up: The save that was cancelled there to make room; empty for none.
    """

    free: bool
    given_up: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.free, self.given_up)


def _arrive(free: bool, given_up: str) -> Vote:
    vote = Vote(free, given_up)
    _arrivals.votes = (*arrived_votes(), vote)
    return vote


def arrived_votes() -> tuple[Vote, ...]:
    """Returns the votes that this thread has received since :func:`vote`: of ranks that have anything to say."""
    votes: tuple[Vote, ...] = getattr(_arrivals, "votes", ())
    return votes


def vote(session: Session, *, durable: bool) -> Vote | None:
    """Returns this rank's vote for the coordinator of a new save; None if there is nothing to say.

    Waits for room in this node's queue.

    Args:
        session: Both tiers.
        durable: True if the save is to go to the durable tier, and this rank is not the coordinator.
    """
    _arrivals.votes = ()
    if not durable or session.is_last or session.is_preempted:
        return None
    free = _is_free(session)
    given_up = session.open().drain.given_up
    return Vote(free, given_up) if given_up or not free else None


def admit(
    session: Session, facts: SaveFacts, held: Collection[StoredPart] = (), votes: Collection[Vote] = ()
) -> SaveFacts:
    """Returns the same facts; for memory only, if too many saves wait for the durable tier already.

    Waits for room in the queue. The last save of a training, or of a preempted job, neither waits nor is skipped: no
    save follows it.

    Args:
        session: Both tiers.
        facts: Facts of the save.
        held: Parts in this node's memory; if one is of this save, another rank has decided.
        votes: Votes of the other ranks of the save: see :func:`vote`.
    """
    if not facts.durable:
        return facts
    # Noted even if this save fails: a delete that follows may delete the checkpoint that this save should replace.
    session.followed = facts.save_id
    _give_up(session, {each.given_up for each in votes})
    is_last = session.is_last or session.is_preempted
    decided = [each.part.durable for each in held if each.save_id == facts.save_id]
    has_room = is_last or all(each.free for each in votes)
    if has_room and (is_last or (decided[0] if decided else _is_free(session, besides=facts.save_id))):
        session.known.note(facts.name, exists=True)
        return facts
    session.counts["skipped"] += 1
    session.note("skipped", name=facts.name, step=facts.step, error="too many saves wait for the durable tier")
    session.log.at_step(facts.step).warning("%s stays in memory: too many saves wait for the durable tier", facts.name)
    return dataclasses.replace(facts, durable=False, left_out=True)


def why_left_out(session: Session, facts: SaveFacts) -> str | None:
    """Returns the reason for which a waited save fails: it is not queued for the durable tier.

    None if training is to continue all the same.
    """
    if not facts.left_out or session.config.on_save_error != "raise" or session.is_preempted:
        return None
    return "too many saves wait for it"


@contextlib.contextmanager
def needing_room(session: Session, facts: SaveFacts) -> Iterator[None]:
    """Fails a durable save if the block has no room.

    Raises:
        MemoryFullError: The save is memory-only, and is skipped.
        SaveError: The save is durable.
    """
    try:
        yield
    except MemoryFullError as full:
        if (left_out := why_left_out(session, facts)) is not None:
            raise SaveError(
                f"{facts.name} is in no tier: {left_out}, and node memory has no room",
                operation="save",
                key=facts.name,
                step=facts.step,
                hint="save again once the durable tier has the earlier ones",
            ) from full
        if not facts.durable:
            raise
        raise _no_room(facts.name, full, facts.step) from full


def _no_room(what: str, full: MemoryFullError, step: int = -1) -> SaveError:
    text = f"no room for {what}: {full.message}"
    return SaveError(text, operation="save", tier="memory", key=full.key, step=ids.known(step), hint=full.hint)


def warn_spilled(session: Session, size: int) -> None:
    """Logs once that checkpoints go to the spill: a warning, unless the user named the folder."""
    tier, config = session.open().tier, session.config
    if tier.spill is None or "spilled" in session.warned:
        return
    text = (
        f"the memory tier can't hold this checkpoint of {size_text(size)} in {config.memory_dir}, so it goes through "
        f"{tier.spill.root} on the node's disk, which may take {size_text(tier.spill.room())} more"
    )
    if config.spill_dir == AUTO:
        session.warn("spilled", f"{text}, and leaves half of what is free to others; see spill_dir")
    else:
        session.warned.add("spilled")
        session.log.info("%s", text)


def skip(session: Session, facts: SaveFacts, reason: Exception) -> None:
    """Counts a memory-only save for which there is no room, with one warning."""
    if not facts.left_out:
        # Otherwise it was counted when it was left out of the durable tier.
        session.counts["skipped"] += 1
        session.note("skipped", name=facts.name, step=facts.step, error=str(reason))
    session.log.at_step(facts.step).debug("%s is skipped: %s", facts.name, reason)
    session.warn(
        "skipped", f"the memory tier can't hold this checkpoint, so steps of memory alone are skipped: {reason}"
    )


@contextlib.contextmanager
def last_saves(session: Session) -> Iterator[None]:
    """Marks saves within the block as the last ones of a training."""
    session.is_last = True
    try:
        yield
    finally:
        session.is_last = False


def _is_free(session: Session, *, besides: str = "") -> bool:
    """Waits for room in this node's queue; returns True if the queue can take one more save."""
    drain = session.open().drain
    try:
        drain.start()
    except MemoryFullError as full:
        raise _no_room("the queue for the durable tier", full) from full
    return drain.has_room(session.save_ids.next(), besides=besides)


def _give_up(session: Session, save_ids: Collection[str]) -> None:
    """Cancels saves that can't become complete any more, as another node has given up its part."""
    drain = session.open().drain
    for each in sorted({*save_ids} & {*drain.pending_saves()}):
        server = session.place.server
        drain.submit(Request(session.save_ids.next(), "cancel", "cancel", session.dirpath, each, server=server))
