"""A second name for a checkpoint, such as ``last.ckpt``: a copy of its object, or an alias that points to it.

A copy is an ordinary checkpoint of one part, committed as any other is. The store copies its bytes instead of an
upload. A copy has a save id of its own, and its content names the save that was copied.

An alias is a manifest that names another checkpoint. An alias owns no object, follows an overwrite of its target, and
goes with its target. The target's manifest names the alias first, so that a delete of the target finds the alias. An
alias whose target has no manifest is no checkpoint: a crash between the two deletes may leave one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.commit import commit
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import Manifests, contents_of, current, repeated
from tiered_checkpoint_io.engine.durable.sweep import Remains, remove_aliases
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.model.manifest import Manifest, Part
from tiered_checkpoint_io.stores.base import CopyRefusedError, ServerCopy, Store, UploadJournal


def put_copy(
    store: Store,
    name: str,
    target: str,
    *,
    save_id: str,
    dirpath: str,
    journal: UploadJournal | None = None,
    progress: Callable[[int], None] | None = None,
    clock: Clock = SYSTEM,
) -> CopyRefusedError | None:
    """Makes ``name`` a copy of ``target``, which the store makes by itself; repeat the call after a StoreError.

    A target of several files, which no store copies at once, gets an alias; and so does one that is being overwritten
    now, or that the store can't copy. A checkpoint saved under ``name`` after the request for the copy, whose id is
    ``save_id``, stays. If ``target`` does not exist, this raises CheckpointNotFoundError, and ``name`` is as it was.

    Returns:
        The reason why the store did not copy; None if it did, or if it was not asked to.
    """
    manifest, old = target_of(Manifests(store, save_id), target, name), current(store, name)
    part = _part_of(store, manifest, name, save_id, dirpath)
    begun = old.content if old is not None and old.previous and old.content.save_id == save_id else None
    # An earlier try may have put the target's former content there: its manifest must stay until the alias'.
    has_changed = begun is not None and part is not None and begun.copy_of != part.content.copy_of
    is_later = old is not None and old.alias_of is not None and old.content.save_id > save_id
    if part is None or has_changed or name == target or is_later:
        put_alias(store, name, target, before=save_id)
        return None

    def check() -> None:
        # An overwrite of the target changes its manifest before it changes the object.
        if current(store, target) != manifest:
            raise StoreError("overwritten while it was copied", operation="copy", key=target, reason="unavailable")

    (entry,) = part.content.files
    try:
        copy = ServerCopy(target, entry.size, check)
        commit(store, part, {entry.basename: copy}, journal=journal, progress=progress, clock=clock)
    except StoreNotFoundError as error:
        text = f"the object of {target!r}, which is to be copied, is missing"
        raise CheckpointNotFoundError(text, operation="copy", tier="durable", key=name) from error
    except CopyRefusedError as refused:
        put_alias(store, name, target, before=save_id)
        return refused
    return None


def _part_of(store: Store, target: Manifest, name: str, save_id: str, dirpath: str) -> Part | None:
    """Returns the part for a copy of a checkpoint; None unless the checkpoint is exactly one object."""
    content = target.content
    if content.parts != 1 or target.previous:
        return None
    files = files_of(store, content).all()
    if [entry.path for entry in files] != [target.name]:
        return None
    entry = replace(files[0], path=name)
    copied = replace(
        content, save_id=save_id, files=(entry,), switch=entry.basename, index=None, copy_of=content.origin
    )
    rank = max(content.coordinator, 0)
    return Part(name, rank, replace(copied, coordinator=rank), dirpath, durable=True)


# ------------------------------------------------------------------------------------------ aliases
@repeated
def put_alias(store: Store, alias: str, target: str, *, before: str | None = None) -> None:
    """Makes ``alias`` point to ``target``; uploads nothing. Aliases that pointed to ``alias`` go.

    A checkpoint saved as ``alias`` after the request, whose id is ``before``, stays, and so does an alias of one: the
    request was left over in the memory of another node. If ``target`` does not exist, this raises
    CheckpointNotFoundError, and the old alias is as it was.
    """
    manifests = Manifests(store, before or alias)
    known = target_of(manifests, target, alias)
    old = manifests.current(alias)
    if alias == target or (before is not None and old is not None and old.content.save_id > before):
        # An earlier try may have set the alias, to a target that was saved later than the request.
        return
    if alias not in known.aliases:
        known = replace(known, aliases=(*known.aliases, alias))
        manifests.put(known)
    own = old if old is not None and old.alias_of is None else None
    remains = Remains.of(store, alias, contents_of([own]))
    manifests.put(replace(known, name=alias, alias_of=target, aliases=(), reserved=manifests.reserved(alias)))
    try:
        manifests.look(target)
    except StoreError as error:
        if error.reason != "changed":
            raise
        if own is None and manifests.current(target) is None:
            # Deleted before the alias was there to go with it; else the alias is not as it was written any more.
            if old is not None:
                manifests.put(old)
            else:
                manifests.delete(alias)
            raise
    if own is not None:
        remove_aliases(manifests, own)
    remains.remove(store)


def target_of(manifests: Manifests, target: str, alias: str) -> Manifest:
    """Returns the manifest of a new alias' or copy's target; CheckpointNotFoundError without one, or for an alias."""
    manifest = manifests.current(target)
    if manifest is None or manifest.alias_of is not None:
        what = "it is an alias itself" if manifest is not None else "it was not uploaded, or is deleted"
        raise CheckpointNotFoundError(
            f"the alias can't be made: there is no checkpoint {target} on the durable tier: {what}",
            operation="alias",
            tier="durable",
            key=alias,
        )
    return manifest
