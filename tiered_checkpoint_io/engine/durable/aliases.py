"""How aliases are set, and how checkpoints and aliases cease to exist on the durable tier.

As in ``commit``, each function is a sequence of single-object writes, ordered so that a crash after any of them
leaves the old state or the new one, and each may be repeated.

- Alias: the target learns of it; what is to go is noted; the alias' manifest; what nothing names any more goes.
- Delete: live aliases inherit the files; what is to go is noted; the manifest goes; files, descriptions, index last.
"""

from __future__ import annotations

from dataclasses import replace

from tiered_checkpoint_io.engine.durable.manifests import contents_of, current, exists, heirs, points_to
from tiered_checkpoint_io.engine.durable.removal import Removal, identity_of
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Manifest
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
        journal: Remembers what is still to be removed, between a crash and the next call.

    Raises:
        CheckpointNotFoundError: ``target`` does not exist. The old alias is as it was.
        FormatVersionError: A newer release owns one of the names.
    """
    removal = Removal.noted(journal)
    manifest = current(store, target)
    if manifest is None or manifest.alias_of is not None:
        raise CheckpointNotFoundError(
            f"an alias needs a checkpoint to point to, and {target!r} is none",
            operation="alias",
            tier="durable",
            key=alias,
            hint="its own save did not reach the durable tier",
        )
    if alias == target:
        return
    old = current(store, alias)
    own = old is not None and old.alias_of is None
    if before is not None and old is not None and old.content.save_id > before:
        return
    moving = [name for name in old.aliases if points_to(store, name, alias)] if own and old is not None else []
    moving.append(alias)
    # The target learns of its aliases first: a delete that comes between must find them.
    known = manifest
    for name in moving:
        known = known.with_alias(name)
    if known is not manifest:
        store.put(ids.manifest_key(target), known.to_json())
    if removal is None and old is not None and old.alias_of != target:
        removal = Removal.of(alias, contents_of([old])) if own else removal_of_alias(store, old)
        removal.note(journal)
    for name in moving:
        store.put(ids.manifest_key(name), replace(known, name=name, alias_of=target).to_json())
    (removal or Removal(alias)).finish(store, journal)


def delete(store: Store, name: str, *, before: str | None = None, journal: UploadJournal) -> None:
    """Makes a checkpoint, or an alias, cease to exist.

    The objects that a live alias names stay until that alias moves on. A file that never had a
    manifest (a save that was given up, or one that others wrote) is removed too.

    Args:
        store: Where.
        name: Which.
        before: The id of the request. A save made later than it is left alone.
        journal: Remembers what is still to be removed, between a crash and the next call.

    Raises:
        FormatVersionError: A newer release owns this name. Nothing was removed.
    """
    removal = Removal.noted(journal)
    manifest = current(store, name)
    if removal is not None and manifest is not None and removal.identity != identity_of(manifest):
        # The name was taken anew between a first try, which got as far as its note, and this one.
        manifest = None
    elif manifest is not None and before is not None and manifest.content.save_id > before:
        return
    elif manifest is None:
        # One that cannot be read stands for no checkpoint either.
        store.delete(ids.manifest_key(name))
    if removal is None:
        if manifest is None:
            removal = Removal(name, (name,) if exists(store, name) and not heirs(store, name) else ())
        elif manifest.alias_of is not None:
            removal = removal_of_alias(store, manifest)
        else:
            removal = Removal.of(name, [] if _hand_over(store, manifest) else contents_of([manifest]))
        if manifest is not None:
            removal = replace(removal, identity=identity_of(manifest))
        removal.note(journal)
    if manifest is not None:
        store.delete(ids.manifest_key(name))
    removal.finish(store, journal)


def aliases_of(replaced: list[Manifest]) -> tuple[str, ...]:
    """The aliases that follow a name whose objects are replaced: see :func:`replaced_by`."""
    if len(replaced) == 1 and replaced[0].alias_of is None:
        return replaced[0].aliases
    return tuple(heir.name for heir in replaced)


def orphans_of(store: Store, name: str, others: list[Content], old: Manifest | None) -> Removal:
    """What nothing refers to once ``name`` has a content in place of ``others``, where ``old`` stood."""
    if old is not None and old.alias_of is not None:
        return removal_of_alias(store, old)
    return Removal.of(name, others)


def removal_of_alias(store: Store, alias: Manifest) -> Removal:
    """What nothing names once ``alias`` is gone: the files of its target, where that is gone and no other has it."""
    target = alias.alias_of
    assert target is not None
    others = [other for other in alias.aliases if other != alias.name]
    if current(store, target) is not None or any(points_to(store, other, target) for other in others):
        return Removal(target)
    return Removal.of(target, contents_of([alias]))


def _hand_over(store: Store, target: Manifest) -> bool:
    """Tells the live aliases of a target that goes what they stand for from now on, if there are any."""
    live = [alias for alias in target.aliases if points_to(store, alias, target.name)]
    for alias in live:
        # The target may have been overwritten, and aliases added, since the alias was made.
        heir = replace(target, name=alias, alias_of=target.name, aliases=tuple(live))
        store.put(ids.manifest_key(alias), heir.to_json())
    return bool(live)
