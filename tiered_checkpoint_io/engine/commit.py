"""How a checkpoint begins and ceases to exist on the durable tier.

Every function here is a sequence of single-object writes, ordered so that a crash after any of
them leaves a state in which a reader finds the old checkpoint or the new one, whole. Each may be
repeated after a crash.

A checkpoint exists if and only if its manifest does. An overwrite goes by three writes: a manifest
that knows both contents, the object, a manifest that knows the new content alone. At every moment
the object matches what some content in the manifest says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    FormatVersionError,
    ManifestError,
    StoreNotFoundError,
    UsageError,
)
from tiered_checkpoint_io.manifest import Content, FileEntry, Manifest, Part, merge_parts
from tiered_checkpoint_io.storage.base import Store, UploadJournal

#: What a journal holds of ours, beside what the store notes there: objects to remove ...
_OBJECTS = "objects"
#: ... and which manifest they belonged to.
_MANIFEST = "manifest"


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
        journal: See :meth:`Store.upload`; also remembers what is to be removed afterwards.
        progress: See :meth:`Store.upload`.

    Returns:
        False where this very save was committed already, and nothing was to be done.

    Raises:
        CorruptCheckpointError: ``data`` differs from its hashes. Nothing was written.
        UsageError: Not a full checkpoint.
        FormatVersionError: A newer release owns this name. Nothing was written.
        StoreError: Repeat the call to finish.
    """
    if part.content.kind != "full":
        raise UsageError(
            f"this release drains full checkpoints, not {part.content.kind} ones", operation="commit", key=part.name
        )
    (entry,) = part.content.files
    plan = journal.read() if journal is not None else None
    old = _current(store, part.name)
    if old is not None and old.alias_of is None and old.content.save_id == part.save_id and not old.previous:
        _finish(store, journal, _planned(plan))
        return False
    verify(entry, data, tier="memory", where=part.name)
    merged = merge_parts([part])
    assert merged is not None
    key = ids.manifest_key(part.name)
    contents: list[Content] = []
    if old is not None and old.alias_of is None:
        merged = replace(merged, aliases=old.aliases)
        contents = [old.content, *old.previous]
    elif _exists(store, entry.path):
        # The object of a deleted checkpoint may live on for aliases, and is what they stand for.
        heirs = _heirs(store, entry.path)
        merged = replace(merged, aliases=tuple(heir.name for heir in heirs))
        contents = [*{each.save_id: each for heir in heirs for each in (heir.content, *heir.previous)}.values()]
    others = tuple(content for content in contents if content.save_id != part.save_id)
    if others and entry.path in {each.path for content in others for each in content.files}:
        store.put(key, replace(merged, previous=others).to_json())
    if journal is not None and plan is not None and _OBJECTS in plan:
        journal.clear()
    store.upload(entry.path, data, journal=journal, progress=progress)
    orphans = _orphans_of_alias(store, old) if old is not None and old.alias_of is not None else []
    if journal is not None and orphans:
        journal.write({_OBJECTS: orphans})
    store.put(key, merged.to_json())
    _finish(store, journal, orphans)
    return True


def put_alias(
    store: Store, alias: str, target: str, *, before: str | None = None, journal: UploadJournal | None = None
) -> None:
    """Makes ``alias`` name the files of ``target``; uploads nothing.

    What pointed to ``alias`` points to ``target`` afterwards.

    Args:
        store: Where.
        alias: The name to set.
        target: A checkpoint that is no alias itself.
        before: The id of the request. A checkpoint saved as ``alias`` later than it is left alone.
        journal: Remembers what is still to be removed, between a crash and the next call.

    Raises:
        CheckpointNotFoundError: ``target`` does not exist. The old alias is as it was.
        FormatVersionError: A newer release owns one of the names.
    """
    plan = journal.read() if journal is not None else None
    manifest = _current(store, target)
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
    old = _current(store, alias)
    own = old is not None and old.alias_of is None
    if own and before is not None and old is not None and old.content.save_id > before:
        return
    moving = [name for name in old.aliases if _points_to(store, name, alias)] if own and old is not None else []
    moving.append(alias)
    # The target learns of its aliases first: a delete that comes between must find them.
    known = manifest
    for name in moving:
        known = known.with_alias(name)
    if known is not manifest:
        store.put(ids.manifest_key(target), known.to_json())
    if plan is None and old is not None and old.alias_of != target:
        plan = {_OBJECTS: _paths(old) if own else _orphans_of_alias(store, old)}
        if journal is not None and plan[_OBJECTS]:
            journal.write(plan)
    for name in moving:
        store.put(ids.manifest_key(name), replace(known, name=name, alias_of=target).to_json())
    _finish(store, journal, _planned(plan))


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
    plan = journal.read()
    manifest = _current(store, name)
    if plan is not None and manifest is not None and plan.get(_MANIFEST) != _identity(manifest):
        # The name was taken anew between a first try, which got as far as its plan, and this one.
        manifest = None
    elif manifest is not None and before is not None and manifest.content.save_id > before:
        return
    elif manifest is None:
        # One that cannot be read stands for no checkpoint either.
        store.delete(ids.manifest_key(name))
    if plan is None:
        if manifest is None:
            orphans = [name] if _exists(store, name) and not _heirs(store, name) else []
        elif manifest.alias_of is not None:
            orphans = _orphans_of_alias(store, manifest)
        elif _hand_over(store, manifest):
            orphans = []
        else:
            orphans = _paths(manifest)
        plan = {_OBJECTS: orphans, _MANIFEST: _identity(manifest) if manifest is not None else None}
        journal.write(plan)
    if manifest is not None:
        store.delete(ids.manifest_key(name))
    _finish(store, journal, _planned(plan))


def _current(store: Store, name: str) -> Manifest | None:
    try:
        return read_manifest(store, name)
    except FormatVersionError:
        raise
    except ManifestError:
        # A damaged manifest describes no checkpoint; there is nothing to keep of it.
        return None


def _identity(manifest: Manifest) -> list[str | None]:
    return [manifest.content.save_id, manifest.alias_of]


def _exists(store: Store, path: str) -> bool:
    try:
        store.size(path)
    except StoreNotFoundError:
        return False
    return True


def _heirs(store: Store, path: str) -> list[Manifest]:
    """The aliases that keep an object whose own manifest is gone. Reads all manifests: for rare cases."""
    names = (ids.name_from_manifest_key(entry.key) for entry in store.list(ids.MANIFEST_PREFIX))
    manifests = (_current(store, name) for name in sorted(name for name in names if name is not None))
    return [each for each in manifests if each is not None and each.alias_of is not None and path in _paths(each)]


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


def _planned(plan: Mapping[str, object] | None) -> list[str]:
    objects = plan.get(_OBJECTS) if plan is not None else None
    return [str(path) for path in objects] if isinstance(objects, list) else []


def _finish(store: Store, journal: UploadJournal | None, paths: Iterable[str]) -> None:
    for path in paths:
        manifest = _current(store, path)
        # A plan may be older than a save that has taken the same name since.
        if manifest is None or manifest.alias_of is not None:
            store.delete(path)
    if journal is not None:
        journal.clear()
