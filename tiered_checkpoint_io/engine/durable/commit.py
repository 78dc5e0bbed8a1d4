"""How a checkpoint begins and ceases to exist on the durable tier.

Every function here is a sequence of single-object writes, ordered so that a crash after any of
them leaves a state in which a reader finds the old checkpoint or the new one, whole. Each may be
repeated after a crash.

A checkpoint exists if and only if its manifest does. An overwrite goes by three writes: a manifest
that knows both contents, the object, a manifest that knows the new content alone. At every moment
the object matches what some content in the manifest says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from tiered_checkpoint_io.engine.durable.journals import Removal, Section, identity_of
from tiered_checkpoint_io.engine.durable.manifests import (
    contents_of,
    current,
    exists,
    heirs,
    orphans_of_alias,
    paths_in,
    paths_of,
    points_to,
    read_manifest,
    replaced_by,
    verify,
)
from tiered_checkpoint_io.errors import CheckpointNotFoundError, UsageError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Manifest, Part, merge_parts
from tiered_checkpoint_io.stores.base import Store, UploadJournal

__all__ = ["abandon", "commit_full", "delete", "put_alias", "read_manifest", "verify"]

_UPLOAD = "upload"
_REMOVAL = "removal"
#: A save that waited in node memory for longer is no newer than what another run has put under its name since.
_LEFT_OVER_S = 60.0

Written = Literal["written", "there", "replaced"]


def commit_full(
    store: Store,
    part: Part,
    data: memoryview,
    *,
    journal: UploadJournal | None = None,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Makes a full checkpoint exist on the durable tier.

    Args:
        store: Where.
        part: The only part of it.
        data: The bytes of its file; verified before anything is written.
        journal: See :meth:`Store.upload`; also remembers what is to be removed afterwards.
        progress: See :meth:`Store.upload`.

    Returns:
        ``there`` where this very save was committed already, and ``replaced`` where a later one has gone past it,
        straight to this tier, or from another node while this one waited: nothing was to be done then.

    Raises:
        CorruptCheckpointError: ``data`` differs from its hashes. Nothing was written.
        UsageError: Not a full checkpoint.
        FormatVersionError: A newer release owns this name. Nothing was written.
        StoreError: Repeat the call to finish.
    """
    if part.content.kind != "full":
        raise UsageError(
            f"a {part.content.kind} checkpoint is committed by its parts", operation="commit", key=part.name
        )
    (entry,) = part.content.files
    upload, removal = (Section(journal, name) if journal is not None else None for name in (_UPLOAD, _REMOVAL))
    old = current(store, part.name)
    if old is not None and old.alias_of is None and old.content.save_id == part.save_id and not old.previous:
        (Removal.noted(removal) or Removal(part.name)).finish(store, removal)
        return "there"
    if old is not None and old.alias_of is None and _has_gone_past(old.content, part.content):
        return "replaced"
    verify(entry, data, tier="memory", where=part.name)
    merged = merge_parts([part])
    assert merged is not None
    key = ids.manifest_key(part.name)
    replaced = replaced_by(store, part.name, entry.path, old)
    merged = replace(merged, aliases=aliases_of(replaced))
    others = tuple(content for content in contents_of(replaced) if content.save_id != part.save_id)
    if entry.path in paths_in(others):
        store.put(key, replace(merged, previous=others).to_json())
    store.upload(entry.path, data, journal=upload, progress=progress)
    orphans = orphans_of(store, merged, others, old)
    orphans.note(removal)
    store.put(key, merged.to_json())
    orphans.finish(store, removal)
    return "written"


def _has_gone_past(old: Content, new: Content) -> bool:
    """Whether what has a name was saved later than what is to take it, as far as can be told."""
    if old.save_id <= new.save_id:
        return False
    # Of other runs the clocks may disagree: there, who comes last has the name, but for what a dead run left in
    # the memory of its node, and the next start there, or a store that was away, lets go on only now.
    return ids.run_id_of(old.save_id) == ids.run_id_of(new.save_id) or time.time() - new.created > _LEFT_OVER_S


def abandon(store: Store, part: Part, journal: UploadJournal) -> None:
    """Ends the upload of a full checkpoint that will not be committed."""
    store.abandon(part.name, Section(journal, _UPLOAD))


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
        removal = Removal(alias, tuple(paths_of(old))) if own else removal_of_alias(store, old)
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
            removal = Removal(name, () if _hand_over(store, manifest) else tuple(paths_of(manifest)))
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


def orphans_of(store: Store, merged: Manifest, others: tuple[Content, ...], old: Manifest | None) -> Removal:
    """What nothing refers to once ``merged`` stands where ``old`` stood, over the contents ``others``."""
    if old is not None and old.alias_of is not None:
        return removal_of_alias(store, old)
    new = paths_of(merged)
    return Removal(merged.name, tuple(path for path in paths_in(others) if path not in new))


def removal_of_alias(store: Store, alias: Manifest) -> Removal:
    """What nothing refers to once ``alias`` is gone."""
    assert alias.alias_of is not None
    return Removal(alias.alias_of, tuple(orphans_of_alias(store, alias)))


def _hand_over(store: Store, target: Manifest) -> bool:
    """Tells the live aliases of a target that goes what they stand for from now on, if there are any."""
    live = [alias for alias in target.aliases if points_to(store, alias, target.name)]
    for alias in live:
        # The target may have been overwritten, and aliases added, since the alias was made.
        heir = replace(target, name=alias, alias_of=target.name, aliases=tuple(live))
        store.put(ids.manifest_key(alias), heir.to_json())
    return bool(live)
