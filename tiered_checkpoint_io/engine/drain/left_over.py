"""What a save has replaced, or retention removed, and could not be deleted: a request of its own, for they are done."""

from __future__ import annotations

from collections.abc import Collection

from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Removal, Section
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.space import MemoryFullError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.place import AtPlace


def remove_later(
    queue: Queue,
    queued: Collection[str],
    log: Logger,
    of: AtPlace,
    what: str | None,
    before: str | None,
    removal: Removal,
    error: StoreError,
) -> bool:
    """Queues a delete that carries out the removal; whether it could.

    Its id is that of the save that was replaced or removed. A delete leaves alone what was saved later than it was
    asked for, so all that this one does is what is noted for it.

    Args:
        queue: Where.
        queued: The ids of all that is in it.
        log: For a warning.
        of: An operation on the durable tier that it is of.
        what: It, for a warning; None for none.
        before: The save that has replaced it, where one has.
        removal: It.
        error: Why it was not carried out.
    """
    replaced = removal.replaced
    if not ids.is_save_id(replaced) or (before is not None and replaced >= before):
        return False
    note = Section(queue.journal(replaced), REMOVAL)
    if replaced in queued:
        # By a try that was cut off right after this.
        return note.read() is not None
    removal.note(note)
    try:
        queue.submit(Request(replaced, "delete", removal.owner, of.dirpath, server=of.server))
    except MemoryFullError:
        note.clear()
        return False
    if what is not None:
        log.warning("%s could not be removed, to be tried again: %s", what, error)
    return True
