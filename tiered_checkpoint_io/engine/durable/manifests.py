"""Manifests on the durable tier: reading them, and whose objects are whose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tiered_checkpoint_io.errors import FormatVersionError, ManifestError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Manifest
from tiered_checkpoint_io.stores.base import Store

_AT_ONCE = 8
_T = TypeVar("_T")
_R = TypeVar("_R")


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


def current(store: Store, name: str) -> Manifest | None:
    """The manifest of a checkpoint, where there is one that describes it.

    Raises:
        FormatVersionError: A newer release owns this name.
        StoreError: The tier could not be asked.
    """
    try:
        return read_manifest(store, name)
    except FormatVersionError:
        raise
    except ManifestError:
        # A damaged manifest describes no checkpoint; there is nothing to keep of it.
        return None


def is_committed(manifest: Manifest | None, save_id: str) -> bool:
    """Whether a manifest says that this save, and no other, is what its name holds."""
    own = manifest is not None and manifest.alias_of is None and not manifest.previous
    return own and manifest is not None and manifest.content.save_id == save_id


def verify(entry: FileEntry, data: memoryview, *, tier: str, where: str) -> None:
    """Compares every chunk of a file with its hash.

    Raises:
        CorruptCheckpointError: One differs.
    """
    for index, (offset, length) in enumerate(entry.chunks):
        entry.check_chunk(index, data[offset : offset + length], tier=tier, where=where)


def contents_of(manifests: Iterable[Manifest]) -> list[Content]:
    """All that some manifests say their objects may hold, each save once."""
    contents = (content for each in manifests for content in (each.content, *each.previous))
    return [*{content.save_id: content for content in contents}.values()]


def exists(store: Store, path: str) -> bool:
    """Whether there is an object under a key."""
    try:
        store.size(path)
    except StoreNotFoundError:
        return False
    return True


def heirs(store: Store, name: str) -> list[Manifest]:
    """The aliases that keep the files of a checkpoint whose own manifest is gone; reads all manifests: a rare case."""
    return [each for each in read_all(store) if each is not None and each.alias_of == name]


def read_all(store: Store, read: Callable[[Store, str], Manifest | None] = current) -> list[Manifest | None]:
    """All manifests, each read by ``read``; None for one that is gone meanwhile."""
    names = (ids.name_from_manifest_key(entry.key) for entry in store.list(ids.MANIFEST_PREFIX))
    return in_parallel(lambda name: read(store, name), sorted(name for name in names if name is not None))


def replaced_by(store: Store, name: str, old: Manifest | None, is_taken: Callable[[], bool]) -> list[Manifest]:
    """Whose objects a save replaces: those of its name, or those that live on for aliases of it.

    Args:
        store: Where.
        name: The name that is saved.
        old: The manifest of that name.
        is_taken: Tells, where there is none, whether objects of this name are there all the same.
    """
    if old is not None and old.alias_of is None:
        return [old]
    # The files of a deleted checkpoint may live on for aliases, and are what they stand for.
    return heirs(store, name) if is_taken() else []


def points_to(store: Store, alias: str, target: str) -> bool:
    """Whether ``alias`` is an alias of ``target`` now."""
    manifest = current(store, alias)
    return manifest is not None and manifest.alias_of == target


def in_parallel(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """``work`` on each item, a few at a time; what it gave, in order. The first error is raised."""
    todo = list(items)
    if len(todo) < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(min(_AT_ONCE, len(todo)), thread_name_prefix="tiered-requests") as pool:
        return list(pool.map(work, todo))
