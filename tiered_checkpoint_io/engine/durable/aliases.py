"""How aliases are set, and how checkpoints and aliases cease to exist on the durable tier.

As in ``commit``, each function is a sequence of single-object writes, ordered so that a crash after any of them
leaves the old state or the new one, and each may be repeated.

- Alias: the target learns of it; what is to go is noted; the alias' manifest; what nothing names any more goes.
- Delete: live aliases inherit the files; what is to go is noted; the manifest goes; files, descriptions, index last.
"""

from __future__ import annotations

from dataclasses import replace

from tiered_checkpoint_io.engine.durable.manifests import contents_of, current, exists, heirs, points_to
from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Removal, Section
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.base import Store, UploadJournal


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
        FormatVersionError: A newer release owns one of the names.
    """
    note = Section(journal, REMOVAL)
    manifest = target_of(store, target, alias)
    old = current(store, alias)
    if alias == target or (before is not None and old is not None and old.content.save_id > before):
        # An earlier try may have set it, to a target that was saved later than the request.
        Removal.noted(alias, note).finish(store, note)
        return
    is_own = old is not None and old.alias_of is None
    moving = [name for name in old.aliases if points_to(store, name, alias)] if old is not None and is_own else []
    moving.append(alias)
    # The target learns of its aliases first: a delete that comes between must find them.
    known = manifest
    for name in moving:
        known = known.with_alias(name)
    if known is not manifest:
        store.put(ids.manifest_key(target), known.to_json())
    if old is not None and old.alias_of != target:
        removal = removal_of(store, old)
        removal.note(note)
    else:
        removal = Removal.noted(alias, note)
    for name in moving:
        store.put(ids.manifest_key(name), replace(known, name=name, alias_of=target).to_json())
    removal.finish(store, note)


def target_of(store: Store, target: str, alias: str) -> Manifest:
    """The manifest of what another name is to stand for.

    Raises:
        CheckpointNotFoundError: There is none, or it is an alias itself.
    """
    manifest = current(store, target)
    if manifest is None or manifest.alias_of is not None:
        raise CheckpointNotFoundError(
            f"an alias needs a checkpoint to point to, and {target!r} is none",
            operation="alias",
            tier="durable",
            key=alias,
            hint="its own save did not reach the durable tier",
        )
    return manifest


def delete(store: Store, name: str, *, before: str | None = None, journal: UploadJournal) -> None:
    """Makes a checkpoint, or an alias, cease to exist.

    The objects that a live alias names stay until that alias moves on. A file that never had a
    manifest (a save that was given up, or one that others wrote) is removed too.

    What is still to be removed is noted in the journal. A save made later than ``before``, the id of the request, is
    left alone.

    Raises:
        FormatVersionError: A newer release owns this name. Nothing was removed.
    """
    note = Section(journal, REMOVAL)
    removal = Removal.noted(name, note)
    manifest = current(store, name)
    if manifest is None:
        # One that cannot be read stands for no checkpoint either.
        store.delete(ids.manifest_key(name))
        if removal.is_empty and exists(store, name) and not heirs(store, name):
            removal = Removal(name, (name,))
    elif before is None or manifest.content.save_id <= before:
        removal = Removal(name) if _hand_over(store, manifest) else removal_of(store, manifest)
        removal.note(note)
        store.delete(ids.manifest_key(name))
    removal.finish(store, note)


def removal_of(store: Store, manifest: Manifest) -> Removal:
    """What nothing names once a manifest is gone: its files; of an alias, those of a target that has no other name."""
    target = manifest.alias_of
    if target is None:
        return Removal.of(manifest.name, contents_of([manifest]))
    others = [other for other in manifest.aliases if other != manifest.name]
    if current(store, target) is not None or any(points_to(store, other, target) for other in others):
        return Removal(target)
    return Removal.of(target, contents_of([manifest]))


def _hand_over(store: Store, target: Manifest) -> bool:
    """Tells the live aliases of a target that goes what they stand for from now on, if there are any."""
    live = [alias for alias in target.aliases if points_to(store, alias, target.name)] if not target.alias_of else []
    for alias in live:
        # The target may have been overwritten, and aliases added, since the alias was made.
        heir = replace(target, name=alias, alias_of=target.name, aliases=tuple(live))
        store.put(ids.manifest_key(alias), heir.to_json())
    return bool(live)
