"""Which parts of sharded checkpoints a rank may remove from memory (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.engine.saving.tickets import Ticket
from tiered_checkpoint_io.engine.staging.retention import safest
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids


@dataclass(frozen=True, slots=True)
class Mine:
    """Which parts in this node's memory this rank may remove: its own, and those of earlier runs."""

    rank: int
    run_id: str

    def __call__(self, stored: StoredPart) -> bool:
        part = stored.part
        own_run = ids.run_id_of(part.save_id) == self.run_id
        return part.content.kind == "sharded" and (part.rank == self.rank or not own_run)


def surplus(held: Iterable[StoredPart], ticket: Ticket, keep_last: int) -> list[StoredPart]:
    """The parts that a rank removes before it captures a save.

    With the new save, memory then holds ``keep_last`` checkpoints; two at least, because the new
    one may fail. Nothing is removed before this run has a complete save, since nobody knows which
    of the earlier ones are whole; nothing that waits for the durable tier is; and nothing that is
    newer than the last complete save, because other ranks may be just finishing it. Other series of
    names may be those of another process group of this job.
    """
    if not ticket.completed:
        return []
    newest = ticket.completed[-1]
    held = list(held)
    older = [
        stored
        for stored in held
        if stored.save_id < newest
        and not stored.pending
        and (not ticket.series or ids.series_of(stored.part.name) == ticket.series)
    ]
    keep = max(1, keep_last - 1)
    kept: Collection[str] = ticket.completed[-keep:]
    if len(kept) < keep:
        others = sorted({stored.save_id for stored in older} - set(kept))
        kept = {*kept, *others[len(kept) - keep :]}
    # What is safe with peers goes only once a newer save is.
    kept = {*kept, *safest((stored.save_id, stored.replicated) for stored in held)}
    return [stored for stored in older if stored.save_id not in kept]
