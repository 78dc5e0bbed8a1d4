"""How aliases are set, and how checkpoints and aliases cease to exist on the durable tier.

As in ``commit``, each function is a sequence of single-object writes, ordered so that a crash after any of them
leaves the old state or the new one, and each may be repeated.

- Alias: the target learns of it; what is to go is noted; the alias' manifest; what nothing names any more goes.
- Delete: live aliases inherit the files; what is to go is noted; the manifest goes; files, descriptions, index last.
  A checkpoint that is held stays; one that is held while its manifest goes gets that back before any file goes.
"""

from __future__ import annotations

from dataclasses import replace

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.holds import refuse_held
from tiered_checkpoint_io.engine.durable.manifests import Manifests, contents_of, repeated
from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Later, Removal, Section, remove_unnamed
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, StoreError
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.base import Store, UploadJournal


@repeated
def put_alias(
    store: Store, alias: str, target: str, *, before: str | None = None, journal: UploadJournal | None = None
) -> None:
    """Makes ``alias`` name the files of ``target``; uploads nothing.

    What pointed to ``alias`` points to ``target`` afterwards.

    Args:
        store: Where.
        alias: The name to set.
        target: A checkpoint that is no alias itself.
        before: The id of the request. A checkpoint saved as ``alias`` later than it is left alone, and so is an
            alias of one: the request was left over in the memory of another node.
        journal: Notes what is still to be removed.

    Raises:
        CheckpointNotFoundError: ``target`` does not exist. The old alias is as it was.
        CorruptCheckpointError: One of the names has another format version.
    """
    note, manifests = Section(journal, REMOVAL), Manifests(store, before or alias)
    manifest = target_of(manifests, target, alias)
    old = manifests.current(alias)
    if alias == target or (before is not None and old is not None and old.content.save_id > before):
        # An earlier try may have set it, to a target that was saved later than the request.
        Removal.noted(alias, note).finish(store, note)
        return
    is_own = old is not None and old.alias_of is None
    moving = [name for name in old.aliases if manifests.points_to(name, alias)] if old is not None and is_own else []
    moving.append(alias)
    # The target learns of its aliases first: a delete that comes between must find them.
    known = manifest
    for name in moving:
        known = known.with_alias(name)
    if known is not manifest:
        manifests.put(known)
    if old is not None and old.alias_of != target:
        removal = removal_of(manifests, old)
        removal.note(note)
    else:
        removal = Removal.noted(alias, note)
    for name in moving:
        manifests.put(replace(known, name=name, alias_of=target, reserved=manifests.reserved(name)))
    try:
        manifests.look(target)
    except StoreError as error:
        if error.reason != "changed":
            raise
        if not is_own and manifests.current(target) is None:
            # Deleted before the alias was there to inherit the files; else the alias is not as it was written any more.
            if old is not None:
                manifests.put(old)
            else:
                manifests.delete(alias)
            note.clear()
            raise
    removal.finish(store, note)


def target_of(manifests: Manifests, target: str, alias: str) -> Manifest:
    """The manifest of what another name is to stand for.

    Raises:
        CheckpointNotFoundError: There is none, or it is an alias itself.
    """
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


@repeated
def delete(
    store: Store,
    name: str,
    *,
    before: str | None = None,
    journal: UploadJournal | None,
    remove_later: Later = None,
    clock: Clock = SYSTEM,
) -> bool:
    """Makes a checkpoint, or an alias, cease to exist; whether it has.

    The objects that a live alias names stay until that alias moves on. A file that never had a
    manifest (a save that was given up, or one that others wrote) is removed too.

    What is still to be removed is noted in the journal; for ``remove_later`` see :meth:`Removal.finish`. A save made
    later than ``before``, the id of the request, is left alone.

    Raises:
        ConfigError: Another program uses it. Nothing was removed.
        CorruptCheckpointError: This name has another format version. Nothing was removed.
        StoreError: Repeat the call to finish.
    """
    note = Section(journal, REMOVAL)
    removal, manifests = Removal.noted(name, note), Manifests(store, before or name)
    manifest = manifests.current(name)
    is_meant = manifest is None or before is None or manifest.content.save_id <= before
    if manifest is None:
        is_left = manifests.conditional.tag(name) is not None if removal.is_empty else True
        if is_left and manifests.heirs(name):
            # What was noted before another run's delete is theirs by now.
            removal = Removal(name)
        elif is_left and removal.is_empty:
            remove_unnamed(manifests, name, name)
        # One that cannot be read stands for no checkpoint either.
        manifests.delete(name)
    elif is_meant:
        refuse_held(store, name, clock=clock)
        removal = Removal(name) if _hand_over(manifests, manifest) else removal_of(manifests, manifest)
        removal = removal.noted_of(manifest, note)
        manifests.delete(name)
        if manifest.alias_of is None and any(manifests.points_to(alias, name) for alias in manifest.aliases):
            # It was set meanwhile: either it finds the target gone, and is taken back, or it has the files from now on.
            removal = Removal(name)
        try:
            refuse_held(store, name, clock=clock)
        except ConfigError as error:
            if error.reason != "held":
                raise
            manifests.put(replace(manifest, reserved=manifests.reserved(name)))
            note.clear()
            raise
    removal.finish(store, note, remove_later)
    return is_meant


def removal_of(manifests: Manifests, manifest: Manifest) -> Removal:
    """What nothing names once a manifest is gone: its files; of an alias, those of a target that has no other name."""
    target = manifest.alias_of
    if target is not None:
        others = [other for other in manifest.aliases if other != manifest.name]
        if manifests.current(target) is not None or any(manifests.points_to(other, target) for other in others):
            return Removal(target)
    return Removal.of(manifests.store, target or manifest.name, contents_of([manifest]))


def _hand_over(manifests: Manifests, target: Manifest) -> bool:
    """Tells the live aliases of a target that goes what they stand for from now on, if there are any."""
    is_alias = target.alias_of is not None
    live = [] if is_alias else [alias for alias in target.aliases if manifests.points_to(alias, target.name)]
    for alias in live:
        # The target may have been overwritten, and aliases added, since the alias was made.
        reserved = manifests.reserved(alias)
        manifests.put(replace(target, name=alias, alias_of=target.name, aliases=tuple(live), reserved=reserved))
    return bool(live)
