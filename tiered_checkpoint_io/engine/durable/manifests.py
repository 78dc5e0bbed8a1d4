"""Manifests on the durable tier: reading them, and what several of them say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from tiered_checkpoint_io.errors import FormatVersionError, ManifestError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Manifest
from tiered_checkpoint_io.stores.base import Store

#: Manifests that are read for the newest save: an upload that failed before may be committed after newer ones.
_LAST = 8
_T = TypeVar("_T")
_P = ParamSpec("_P")


def if_intact(read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """What ``read`` gives of its arguments; None where that document is missing or damaged.

    Raises:
        FormatVersionError: A newer release wrote it.
        StoreError: The tier could not be asked.
    """
    try:
        return read(*args, **kwargs)
    except FormatVersionError:
        raise
    except (ManifestError, StoreNotFoundError):
        return None


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
    """The manifest of a checkpoint; a damaged one describes no checkpoint. Raises as :func:`if_intact`."""
    return if_intact(read_manifest, store, name)


def contents_of(manifests: Iterable[Manifest | None]) -> list[Content]:
    """All that some manifests say their objects may hold, each save once."""
    contents = (content for each in manifests if each is not None for content in (each.content, *each.previous))
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
    return [each for each in read_all(store, current) if each.alias_of == name]


def read_all(store: Store, read: Callable[[Store, str], Manifest | None]) -> list[Manifest]:
    """All manifests, each read by ``read``, but those of which it gives none."""
    names = (ids.name_from_manifest_key(entry.key) for entry in store.list(ids.MANIFEST_PREFIX))
    found = in_parallel(lambda name: read(store, name), sorted(name for name in names if name is not None))
    return [manifest for manifest in found if manifest is not None]


def newest_save_id(store: Store) -> str | None:
    """The newest save id on the durable tier, by one list and the few manifests that were committed last.

    Raises:
        StoreError: The tier could not be asked.
    """
    listed = sorted(store.list(ids.MANIFEST_PREFIX), key=lambda entry: entry.modified)
    names = [name for name in (ids.name_from_manifest_key(entry.key) for entry in listed) if name is not None]
    found: list[str] = []
    for manifest in in_parallel(lambda name: _readable(store, name), names[-_LAST:]):
        found += [] if manifest is None else [manifest.content.save_id]
    return max(found, default=None)


def _readable(store: Store, name: str) -> Manifest | None:
    try:
        return read_manifest(store, name)
    except ManifestError:
        # Damaged, or a newer release's: what it says of the order can't be known.
        return None


def points_to(store: Store, alias: str, target: str) -> bool:
    """Whether ``alias`` is an alias of ``target`` now."""
    manifest = current(store, alias)
    return manifest is not None and manifest.alias_of == target
