"""A checkpoint at the durable tier put anew with another state, in its own place in the order of saves."""

from __future__ import annotations

import mmap
from typing import Any

from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.manifests import current
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.saver import Facts, part_of
from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.model import ids


def rewrite(session: Session, name: str, state: Any) -> bool:
    """Replaces what a full checkpoint at the durable tier holds; readers see the old or the new, whole.

    It counts as older than every save of the run that made it, so that nobody resumes from it who may
    have a later one. Nothing may be queued for this name meanwhile.

    Args:
        session: Of the job.
        name: Which.
        state: Anything that ``torch.save`` takes.

    Returns:
        False where there is no full checkpoint of this name.

    Raises:
        StoreError: Repeat the call to finish; what was there is whole.
    """
    store = session.durable()
    manifest = current(store, name)
    if manifest is None or manifest.alias_of is not None or manifest.content.kind != "full":
        return False
    old = manifest.content
    facts = Facts(
        name=name,
        save_id=ids.before_its_run(old.save_id),
        step=old.step,
        epoch=old.epoch,
        world_size=old.world_size,
        rank=0,
        dirpath=session.dirpath,
        durable=True,
        metric=old.metric,
    )
    image = plan(state)
    with mmap.mmap(-1, image.size) as buffer, memoryview(buffer) as view:
        hashes = image.fill(view)
        with view.toreadonly() as data:
            commit.commit_full(store, part_of(image, facts, hashes), data)
    return True
