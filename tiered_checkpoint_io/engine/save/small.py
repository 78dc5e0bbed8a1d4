"""What is said, once each, where node memory has no room for a job's checkpoints.

It is said again where there was room meanwhile: a training of weeks may run short of it more than once.
"""

from __future__ import annotations

from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.spill import AUTO


def had_room(session: Session, *, durable: bool, streamed: bool) -> None:
    """Notes that a save had room, unless it was streamed: the next one without room is warned of again."""
    if not streamed:
        session.warned.discard("streamed" if durable else "skipped")


def warn_streamed(session: Session, reason: Exception) -> None:
    """Warns that neither memory nor the spill can hold a durable save."""
    text = f"the memory tier can't hold this checkpoint, so durable saves block training: {reason}"
    session.warn("streamed", text)


def warn_spilled(session: Session, size: int) -> None:
    """Tells that checkpoints go to the spill: a warning, unless the user named the folder."""
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
    """Counts a save of memory alone for which there is no room, with one warning."""
    if not facts.left_out:
        # Otherwise it was counted when it was left out of the durable tier.
        session.counts["skipped"] += 1
        session.note("skipped", name=facts.name, step=facts.step, error=str(reason))
    session.log.at_step(facts.step).debug("%s is skipped: %s", facts.name, reason)
    text = f"the memory tier can't hold this checkpoint, so steps of memory alone are skipped: {reason}"
    if session.config.spill_dir in (AUTO, None):
        text += "; a named spill_dir would hold them"
    session.warn("skipped", text)
