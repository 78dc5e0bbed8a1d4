"""Manifests on the durable tier: reads, their union, and changes. All raise StoreError if the tier can't be asked.

Two drains may work on one name: of two runs, or of one job on two nodes. So an operation changes a manifest only while
it is as the operation has read it (:class:`Manifests`), and an object that several saves write in turn, the switch,
only after such a change, and while that is as it was. An operation that meets a change begins again (:func:`repeated`).
A tag that is a digest is the same again once the same bytes are there again, so the manifest is read once more right
before such an object is written to (:meth:`Manifests.look`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, ParamSpec, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import (
    ConfigError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    is_other_format,
)
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import hash_bytes
from tiered_checkpoint_io.model.manifest import Content, Manifest, reservation, reservation_in
from tiered_checkpoint_io.stores.base import ObjectInfo, Store, changed, conditional

_T = TypeVar("_T")
#: Listings have times in whole seconds: a document read so soon after a change may change again unseen. Measured by the
#: listing's times, or by how long the document has been unchanged.
_SETTLED_S = 2.0


class _Known(NamedTuple):
    """One manifest: its listing, since when, whether a later change would show, and the result of the read."""

    entry: ObjectInfo
    since: float
    is_settled: bool
    value: Manifest | CorruptCheckpointError | None


class DurableView:
    """The manifests of a durable tier, as they were last read."""

    def __init__(self) -> None:
        self._read: dict[str, _Known] = {}

    def look(self, store: Store, clock: Clock = SYSTEM) -> dict[str, Manifest | CorruptCheckpointError]:
        """Returns all manifests, by name: one list, and a GET for each that is new, or may have changed."""
        now, listed = clock.monotonic(), _listed(store)
        latest = max((entry.modified for entry in listed.values()), default=0.0)
        kept = {name: each for name, each in self._read.items() if listed.get(name) == each.entry}
        fresh = [name for name in listed if name not in kept or not kept[name].is_settled]
        for name, value in zip(fresh, in_parallel(lambda each: _understood(store, each), fresh), strict=True):
            before, entry = kept.get(name), listed[name]
            since = now if before is None else before.since
            is_settled = entry.modified < latest - _SETTLED_S or now - since > _SETTLED_S
            kept[name] = _Known(entry, since, is_settled, value)
        self._read = kept
        return {name: each.value for name, each in kept.items() if each.value is not None}


#: Manifests that are read for the newest save: an upload that failed before may be committed after newer ones.
_LAST = 8
#: No reservation has more bytes, except one of a long name; no manifest has fewer than 400.
_MAX_RESERVATION = 400
_P = ParamSpec("_P")
#: Number of turns of an operation that begins again at once: two drains at one name are done within two or three.
_TURNS = 4


def repeated(operation: Callable[_P, _T]) -> Callable[_P, _T]:
    """Has an operation begin again, a few times, if another changes a document that it has read."""

    @functools.wraps(operation)
    def repeat(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for _ in range(_TURNS - 1):
            try:
                return operation(*args, **kwargs)
            except StoreError as error:
                if error.reason != "changed":
                    raise
        return operation(*args, **kwargs)

    return repeat


class Manifests:
    """The manifests that one operation reads and changes, each only if it is unchanged since it was first read.

    Attributes:
        store: Store that has the manifests.
        conditional: The same store, for conditional writes.
    """

    def __init__(self, store: Store, owner: str) -> None:
        """Begins an operation, whose id is ``owner``; sends no request yet."""
        self.store = store
        self.conditional = conditional(store)
        self._owner = owner
        self._tags: dict[str, str | None] = {}
        self._reserved: dict[str, str] = {}
        self._read: dict[str, Manifest | None] = {}
        self._data: dict[str, bytes] = {}

    def current(self, name: str) -> Manifest | None:
        """Returns the manifest of a checkpoint; a damaged one, or a reservation, describes no checkpoint.

        Raises CorruptCheckpointError for another format version.
        """
        key = ids.manifest_key(name)
        tag: str | None
        try:
            data, tag = self.conditional.get_tagged(key)
        except StoreNotFoundError:
            data, tag = b"", None
        manifest = if_intact(Manifest.from_json, data, where=f"{self.store.url}/{key}") if tag is not None else None
        if name not in self._tags:
            self._tags[name], self._read[name], self._data[name] = tag, manifest, data
            self._reserved[name] = manifest.reserved if manifest is not None else reservation_in(data)
        return manifest

    def put(self, manifest: Manifest) -> None:
        """Replaces the manifest that was read; StoreError if another drain was faster."""
        self._put(manifest.name, manifest.to_json())

    def delete(self, name: str) -> None:
        """Removes the manifest that was read, if one was. Raises as :meth:`put`."""
        tag = self._tags[name]
        if self._reserved[name]:
            if self._read[name] is not None:
                self._put(name, reservation(name, self._mark(name)))
        elif tag is not None:
            self.conditional.delete_if(ids.manifest_key(name), tag)
            self._tags[name] = None

    def reserve(self, name: str, manifest: Manifest | None = None) -> None:
        """Marks the place of a manifest whose objects are about to change: see :func:`reservation`.

        A manifest that was read there stays, with the mark, or ``manifest`` takes its place. Raises as :meth:`put`.
        """
        mark, manifest = self._mark(name), manifest or self._read[name]
        data = reservation(name, mark) if manifest is None else replace(manifest, reserved=mark).to_json()
        self._put(name, data)
        self._reserved[name] = mark

    def reserved(self, name: str) -> str:
        """Returns the mark of the last reservation of a name that was read; empty if it never had one."""
        return self._reserved[name]

    def look(self, name: str) -> None:
        """Checks that a manifest is as it was read, or last written: else others expect no write."""
        key, data = ids.manifest_key(name), b""
        with contextlib.suppress(StoreNotFoundError):
            data = self.store.get(key)
        if data != self._data[name]:
            raise changed("look", key)

    def _put(self, name: str, data: bytes) -> None:
        self._tags[name] = self.conditional.put_if(ids.manifest_key(name), data, self._tags[name])
        self._data[name] = data

    def _mark(self, name: str) -> str:
        """Returns a unique mark: some tags are digests, equal for equal text."""
        return hash_bytes(f"{self._owner} {self.reserved(name)} {self._tags[name]}".encode())


def if_intact(read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """Returns the document that ``read`` reads; None if it is missing or damaged. Another format is an error."""
    try:
        return read(*args, **kwargs)
    except (CorruptCheckpointError, StoreNotFoundError) as error:
        if is_other_format(error):
            raise
        return None


def read_manifest(store: Store, name: str) -> Manifest | None:
    """Returns the manifest of a checkpoint; None if there is no such checkpoint.

    Raises CorruptCheckpointError if it can't be understood, and StoreError if it can't be read: keep its objects.
    """
    key = ids.manifest_key(name)
    try:
        data = store.get(key)
    except StoreNotFoundError:
        return None
    try:
        return Manifest.from_json(data, where=f"{store.url}/{key}")
    except CorruptCheckpointError:
        if reservation_in(data):
            return None
        raise


def _understood(store: Store, name: str) -> Manifest | CorruptCheckpointError | None:
    """Returns the manifest of a checkpoint, or why it can't be understood; None if there is none."""
    try:
        return read_manifest(store, name)
    except CorruptCheckpointError as error:
        return error
    except (ConfigError, StoreError) as error:
        if isinstance(error, StoreError) and error.reason != "archived":
            raise
        # The other manifests are there all the same.
        where = error.key or ids.manifest_key(name)
        return CorruptCheckpointError(error.message, operation="read", key=where, hint=error.hint)


def current(store: Store, name: str) -> Manifest | None:
    """Returns the manifest of a checkpoint; a damaged one describes no checkpoint. Raises as :func:`if_intact`."""
    return if_intact(read_manifest, store, name)


def contents_of(manifests: Iterable[Manifest | None]) -> list[Content]:
    """Returns all contents that manifests say their objects may hold, each save once."""
    contents = (content for each in manifests if each is not None for content in (each.content, *each.previous))
    return [*{content.save_id: content for content in contents}.values()]


def _listed(store: Store) -> dict[str, ObjectInfo]:
    """Returns the listed manifests and reservations, by the name of their checkpoint."""
    listed = {ids.name_from_manifest_key(entry.key): entry for entry in store.list(ids.MANIFEST_PREFIX)}
    return {name: entry for name, entry in listed.items() if name is not None}


def names_of(store: Store) -> set[str]:
    """Returns all names that have a manifest, by one list; reads manifests that may be reservations."""
    listed = _listed(store)

    def is_there(name: str) -> bool:
        return listed[name].size > _MAX_RESERVATION or _understood(store, name) is not None

    there = in_parallel(is_there, listed)
    return {name for name, is_one in zip(listed, there, strict=True) if is_one}


def newest_save_id(store: Store) -> str | None:
    """Returns the newest save id on the durable tier, by one list and the few last manifests."""
    listed = _listed(store)
    last = sorted(listed, key=lambda name: listed[name].modified)[-_LAST:]
    # The place of one that can't be understood in the order is unknown.
    found = in_parallel(lambda name: _understood(store, name), last)
    return max((manifest.content.save_id for manifest in found if isinstance(manifest, Manifest)), default=None)
