"""What a committed save has replaced, and could not be removed: a request of its own, for the save itself is done."""

from __future__ import annotations

from collections.abc import Collection

from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Removal, Section
from tiered_checkpoint_io.errors import MemoryFullError, StoreError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part


def remove_later(
    queue: Queue, queued: Collection[str], log: Logger, part: Part, removal: Removal, error: StoreError
) -> bool:
    """Queues a delete that carries out the removal; whether it could.

    Its id is that of the save that was replaced. A delete leaves alone what was saved later than it was asked for, so
    all that this one does is what is noted for it.

    Args:
        queue: Where.
        queued: The ids of all that is in it.
        log: For a warning.
        part: Of the save that is committed.
        removal: What is still to be removed.
        error: Why it was not.
    """
    replaced = removal.replaced
    if not ids.is_save_id(replaced) or replaced >= part.save_id or replaced in queued:
        return False
    note = Section(queue.journal(replaced), REMOVAL)
    removal.note(note)
    try:
        queue.submit(Request(replaced, "delete", part.name, part.dirpath, server=part.server))
    except MemoryFullError:
        note.clear()
        return False
    log.warning("%s is durable; what it replaced could not be removed, to be tried again: %s", part.name, error)
    return True
