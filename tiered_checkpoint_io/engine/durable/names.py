"""Whether a name holds a save, or what may not give way to it. Pure."""

from __future__ import annotations

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest, Part


def gone_past(old: Manifest | None, part: Part, clock: Clock, *, is_new: bool = False) -> bool:
    """Whether what has a name was saved later than what is to take it, as far as can be told.

    What replaces nothing (``is_new``) counts as earlier than any other save.
    """
    if is_new:
        return old is not None and old.content.save_id != part.save_id
    if old is None or old.alias_of is not None or old.content.save_id <= part.save_id:
        return False
    # Clocks of different runs may disagree: there the last to commit gets the name, except for a save that a dead run
    # left in its node's memory, and that is uploaded only now.
    same_run = ids.run_id_of(old.content.save_id) == ids.run_id_of(part.save_id)
    return same_run or clock.wall() - part.content.created > clock.timing.left_over_s


def is_committed(manifest: Manifest | None, part: Part) -> bool:
    """Whether a manifest says that the save of this part, and no other, is what its name holds."""
    if manifest is None or manifest.alias_of is not None or manifest.previous:
        return False
    return manifest.content.save_id == part.save_id
