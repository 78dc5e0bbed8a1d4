"""A checkpoint on the durable tier replaced by another state, in its own place in the order of saves."""

from __future__ import annotations

import mmap
from typing import Any

from tiered_checkpoint_io.adapters.storage_options import is_resumable
from tiered_checkpoint_io.engine.durable.commit import commit
from tiered_checkpoint_io.engine.durable.manifests import current
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry


def is_full(session: Session, name: str) -> bool:
    """Whether the durable tier has a full checkpoint of this name, which :func:`rewrite` can replace.

    Where it has none that it can, of a sharded one it warns, once.

    Raises:
        StoreError: It could not be asked.
    """
    manifest = current(session.durable(), name)
    if manifest is None or manifest.alias_of is not None:
        return False
    if manifest.content.kind == "full":
        return True
    if rewrite.__name__ not in session.warned:
        session.warned.add(rewrite.__name__)
        text = "save_last_n_optim_states is for full checkpoints: %s is a %s one, and such keep their optimizer states"
        session.log.warning(text, name, manifest.content.kind)
    return False


def rewrite(session: Session, name: str, state: Any) -> bool:
    """Replaces what a full checkpoint on the durable tier holds; readers see the old or the new one, complete.

    It counts as older than every save of the run that made it, so that no run resumes from it that may
    have a later one. Nothing may be queued for this name meanwhile.

    Args:
        session: Of the job.
        name: Which.
        state: Anything that ``torch.save`` takes.

    Returns:
        False where there is no full checkpoint of this name.

    Raises:
        StoreError: Repeat the call to finish; what was there is complete.
    """
    store = session.durable()
    manifest = current(store, name)
    if manifest is None or manifest.alias_of is not None or manifest.content.kind != "full":
        return False
    old = manifest.content
    facts = SaveFacts(
        name,
        ids.before_its_run(old.save_id),
        old.step,
        old.world_size,
        durable=True,
        payload="full",
        epoch=old.epoch,
        metric=old.metric,
        coordinator=0,
        resumable=old.resumable and is_resumable(state, name),
    )
    image = plan(state)
    with mmap.mmap(-1, image.size) as buffer, memoryview(buffer) as view:
        entry = FileEntry(name, image.size, image.chunk_size, image.fill(view))
        part = facts.describe(0, session.place, (entry,), created=session.clock.wall(), namespace=old.namespace)
        with view.toreadonly() as data:
            commit(store, part, {entry.basename: data})
    return True
