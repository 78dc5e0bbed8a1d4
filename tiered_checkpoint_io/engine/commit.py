"""How a checkpoint begins and ceases to exist on the durable tier.

Every function here is a sequence of single-object writes, ordered so that a crash after any of
them leaves a state in which a reader finds the old checkpoint or the new one, whole. Each may be
repeated after a crash.

A checkpoint exists if and only if its manifest does. An overwrite goes by three writes: a manifest
that knows both contents, the object, a manifest that knows the new content alone. At every moment
the object matches what some content in the manifest says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    FormatVersionError,
    ManifestError,
    StoreNotFoundError,
)
from tiered_checkpoint_io.manifest import FileEntry, Manifest, Part, merge_parts
from tiered_checkpoint_io.storage.base import Store, UploadJournal


def read_manifest(store: Store, name: str) -> Manifest | None:
    """The manifest of a checkpoint; None where there is no such checkpoint.

    Raises:
        ManifestError: It can't be understood.
        StoreError: The tier could not be asked.
    """
    key = ids.manifest_key(name)
    try:
        return Manifest.from_json(store.get(key), where=f"{store.url}/{key}")
    except StoreNotFoundError:
        return None


def verify(entry: FileEntry, data: memoryview, *, tier: str, where: str) -> None:
    """Compares every chunk of a file with its hash.

    Raises:
        CorruptCheckpointError: One differs.
    """
    for index, (offset, length) in enumerate(entry.chunks):
        entry.check_chunk(index, data[offset : offset + length], tier=tier, where=where)


def commit_full(
    store: Store,
    part: Part,
    data: memoryview,
    *,
    journal: UploadJournal | None = None,
    progress: Callable[[int], None] | None = None,
) -> bool:
    """Makes a full checkpoint exist on the durable tier.

    Args:
        store: Where.
        part: The only part of it.
        data: The bytes of its file; verified before anything is written.
        journal: See :meth:`Store.upload`.
        progress: See :meth:`Store.upload`.

    Returns:
        False where this very save was committed already, and nothing was to be done.

    Raises:
        CorruptCheckpointError: ``data`` differs from its hashes. Nothing was written.
        FormatVersionError: A newer release owns this name. Nothing was written.
        StoreError: Repeat the call to finish.
    """
    (entry,) = part.content.files
    old = _current(store, part.name)
    if old is not None and old.alias_of is None and old.content.save_id == part.save_id and not old.previous:
        return False
    verify(entry, data, tier="memory", where=part.name)
    merged = merge_parts([part])
    assert merged is not None
    key = ids.manifest_key(part.name)
    if old is not None and old.alias_of is None:
        merged = replace(merged, aliases=old.aliases)
        if old.content.save_id != part.save_id:
            both = replace(merged, previous=(old.content, *old.previous))
            store.put(key, both.to_json())
    store.upload(entry.path, data, journal=journal, progress=progress)
    store.put(key, merged.to_json())
    if old is not None and old.alias_of is not None:
        _delete_objects(store, _orphans_of_alias(store, old))
    return True


def put_alias(store: Store, alias: str, target: str) -> None:
    """Makes ``alias`` name the files of ``target``; uploads nothing.

    Raises:
        CheckpointNotFoundError: ``target`` does not exist. The old alias is as it was.
        FormatVersionError: A newer release owns one of the names.
    """
    manifest = _current(store, target)
    if manifest is None or manifest.alias_of is not None:
        raise CheckpointNotFoundError(
            f"an alias needs a checkpoint to point to, and {target!r} is none",
            operation="alias",
            tier="durable",
            key=alias,
            hint="its own save did not reach the durable tier",
        )
    old = _current(store, alias)
    # The target learns of its alias first: a delete that comes between must find it.
    known = manifest.with_alias(alias)
    if known is not manifest:
        store.put(ids.manifest_key(target), known.to_json())
    pointer = replace(known, name=alias, alias_of=target)
    store.put(ids.manifest_key(alias), pointer.to_json())
    if old is not None and old.alias_of != target:
        _delete_objects(store, _orphans_of_alias(store, old) if old.alias_of else _paths(old))


def delete(store: Store, name: str, *, before: str | None = None, journal: UploadJournal) -> None:
    """Makes a checkpoint, or an alias, cease to exist.

    The objects that a live alias names stay until that alias moves on.

    Args:
        store: Where.
        name: Which.
        before: The id of the request. A save made later than it is left alone.
        journal: Remembers what is still to be removed, between a crash and the next call.

    Raises:
        FormatVersionError: A newer release owns this name. Nothing was removed.
    """
    plan = journal.read()
    if plan is None:
        manifest = _current(store, name)
        if manifest is None or (before is not None and manifest.content.save_id > before):
            return
        if manifest.alias_of is not None:
            orphans = _orphans_of_alias(store, manifest)
        elif _hand_over(store, manifest):
            orphans = []
        else:
            orphans = _paths(manifest)
        plan = {"objects": orphans}
        journal.write(plan)
    store.delete(ids.manifest_key(name))
    objects = plan.get("objects")
    _delete_objects(store, [str(path) for path in objects] if isinstance(objects, list) else [])
    journal.clear()


def _current(store: Store, name: str) -> Manifest | None:
    try:
        return read_manifest(store, name)
    except FormatVersionError:
        raise
    except ManifestError:
        # A damaged manifest describes no checkpoint; there is nothing to keep of it.
        return None


def _hand_over(store: Store, target: Manifest) -> bool:
    """Tells the live aliases of a target that goes what they stand for from now on, if there are any."""
    live = [alias for alias in target.aliases if _points_to(store, alias, target.name)]
    for alias in live:
        # The target may have been overwritten, and aliases added, since the alias was made.
        heir = replace(target, name=alias, alias_of=target.name, aliases=tuple(live))
        store.put(ids.manifest_key(alias), heir.to_json())
    return bool(live)


def _points_to(store: Store, alias: str, target: str) -> bool:
    manifest = _current(store, alias)
    return manifest is not None and manifest.alias_of == target


def _orphans_of_alias(store: Store, alias: Manifest) -> list[str]:
    """The objects that nothing refers to once ``alias`` is gone."""
    target = alias.alias_of
    assert target is not None
    if _current(store, target) is not None:
        return []
    others = [other for other in alias.aliases if other != alias.name]
    return [] if any(_points_to(store, other, target) for other in others) else _paths(alias)


def _paths(manifest: Manifest) -> list[str]:
    contents = (manifest.content, *manifest.previous)
    return sorted({entry.path for content in contents for entry in content.files})


def _delete_objects(store: Store, paths: Iterable[str]) -> None:
    for path in paths:
        store.delete(path)
