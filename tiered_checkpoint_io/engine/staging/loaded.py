"""Retention of loaded checkpoints in a node's memory: their limit is that of saved ones; they go if room is needed.

A node or a process that only loads has no save that would remove anything. A load removes only parts of its own payload
and series, and none that another process reads, that only this node has saved, or that waits for its upload.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tiered_checkpoint_io.engine.staging.capture import acquire_for
from tiered_checkpoint_io.engine.staging.retention import Scope, all_complete, removable, room_for
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import PINNED, StoredPart, is_read
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part


def slot_for(tier: MemoryTier, part: Part, size: int) -> Slot:
    """Returns a slot of ``size`` bytes for a loaded part; if there is no room, parts of earlier loads go.

    If memory has no room even so, the slot is one of the spill.

    Raises:
        MemoryFullError: There is no room there either.
    """

    def going_for(missing: int, *, spilled: bool = False) -> list[StoredPart]:
        scope = _scope(part)
        # A part of another payload or series of this job may be the newest.
        ours = [each for each in tier.parts() if scope.covers(each) or each.part.place != scope.place]
        here = [each for each in ours if tier.is_spilled(each.folder) == spilled and _may_go(each)]
        # The new part counts as if it were there: older ones may go for it, even the newest that this node has.
        coming = StoredPart(part, Path(), drained=True)
        return room_for(missing, [*here, coming], scope, {part.save_id, *tier.awaited(True)})

    try:
        return acquire_for(tier, size, going_for)
    except MemoryFullError:
        spill = tier.open_spill()
        if spill is None:
            raise
        return acquire_for(spill, size, partial(going_for, spilled=True))


def retain_loaded(tier: MemoryTier, part: Part, keep: int) -> None:
    """Removes loaded parts beyond ``keep``, now that all ranks of this node have opened ``part``."""
    held, scope = tier.parts(), _scope(part)
    retained = {part.save_id, *tier.awaited(False)}
    for stored in removable(held, scope, max(1, keep), all_complete(held, scope), retained):
        if _may_go(stored):
            tier.remove(stored)


def _may_go(stored: StoredPart) -> bool:
    # A checkpoint of one part that is not pinned yet may be one that another process has fetched and is about to open;
    # of a shard, only the processes of one rank after the other do so.
    was_opened = stored.part.content.parts > 1 or (stored.folder / PINNED).exists()
    return stored.drained and was_opened and not is_read(stored)


def _scope(part: Part) -> Scope:
    kind, place = part.content.kind, part.place
    # The same as in saves of the payload: the names of full checkpoints are one series.
    series = "" if kind == "full" else ids.series_of(part.name, part.content.step)
    return Scope(part.save_id, part.rank, kind, place.dirpath, series, own_rank_only=True, server=place.server)
