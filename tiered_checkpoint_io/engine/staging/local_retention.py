"""Which parts of local checkpoints a rank may remove from memory (pure).

What a node's memory holds of a save tells nothing of other nodes: one that has no room sends its parts straight to
the durable tier, or fails. Such a save is *lacking*, as its ranks have said, and lets no older one go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.engine.staging.retention import safest
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids


@dataclass(frozen=True, slots=True)
class Mine:
    """Which parts in this node's memory a rank may remove: its own, and those of earlier starts."""

    shard: int
    save_id: str
    series: str

    def __call__(self, stored: StoredPart) -> bool:
        return self.belongs(stored) and (stored.part.rank == self.shard or not self.of_this_run(stored))

    def belongs(self, stored: StoredPart) -> bool:
        return stored.part.content.kind == "local" and ids.series_of(stored.part.name) == self.series

    def of_this_run(self, stored: StoredPart) -> bool:
        return ids.line_of(stored.save_id) == ids.line_of(self.save_id)


def surplus(
    held: Collection[StoredPart], mine: Mine, keep_last: int, lacking: Collection[str] = ()
) -> list[StoredPart]:
    """The parts that a rank removes before it captures a save.

    Ranks that train together are never more than one save apart, since each step needs all of them.
    With the new save, memory then holds ``keep_last`` checkpoints; two at least, because the new one may
    fail. Nothing goes before a newer one is whole, as far as one node can tell, and nothing of earlier
    starts before two of this one are; nor what waits for the durable tier. Of saves that are lacking,
    which no memory will ever make whole, the newest is kept.

    Args:
        held: All parts in this node's memory.
        mine: What this rank may remove.
        keep_last: How many checkpoints memory keeps.
        lacking: Ids of saves of which some node's memory has no part.
    """
    of_run = [stored for stored in held if mine.belongs(stored) and mine.of_this_run(stored)]
    free = [stored for stored in held if mine(stored) and not stored.pending]
    newest = max((stored.save_id for stored in of_run), default="")
    useless = [stored for stored in free if stored.save_id in lacking and stored.save_id < newest]
    whole = whole_saves(of_run, mine.series, lacking)
    if not whole:
        return useless
    keep = max(1, keep_last - 1)
    older = [stored for stored in free if stored.save_id < whole[-1] and stored not in useless]
    if len(whole) < 2:
        older = [stored for stored in older if mine.of_this_run(stored)]
    kept = whole[-keep:]
    if len(kept) < keep:
        others = sorted({stored.save_id for stored in older} - set(kept))
        kept = [*kept, *others[len(kept) - keep :]]
    # What is safe with peers goes only once a newer save is.
    kept = [*kept, *safest((stored.save_id, stored.replicated) for stored in held if mine.belongs(stored))]
    return useless + [stored for stored in older if stored.save_id not in kept]


def whole_saves(held: Iterable[StoredPart], series: str, lacking: Collection[str] = ()) -> list[str]:
    """Ids of the saves that have a part of each rank that has saved on this node in the same run, in order.

    Args:
        held: All parts in this node's memory.
        series: Of which names, see :func:`ids.series_of`.
        lacking: See :func:`surplus`.
    """
    ranks: dict[str, set[int]] = {}
    of_run: dict[str, set[int]] = {}
    for stored in held:
        part = stored.part
        if part.content.kind == "local" and ids.series_of(part.name) == series:
            ranks.setdefault(part.save_id, set()).add(part.rank)
            of_run.setdefault(ids.line_of(part.save_id), set()).add(part.rank)
    there = {save_id for save_id, have in ranks.items() if have == of_run[ids.line_of(save_id)]}
    return sorted(there - set(lacking))
