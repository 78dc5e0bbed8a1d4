"""Deletes on the durable tier: first the manifest goes, then a sweep removes unnamed saves.

As in ``commit``, each write concerns one object, and a crash after any of them leaves the checkpoint or none.

====  ===============================================================  ============================  =================
      write                                                            a reader finds                after a crash
====  ===============================================================  ============================  =================
D1    the description of files that only the manifest lists            the checkpoint                repeat the delete
D2    the manifest goes                                                none                          the sweep
D3    manifests of aliases that point to it go                         none: such an alias is none   the next prune
D4    its files go                                                     none                          the sweep
D5    its descriptions and its index go                                none                          the sweep
====  ===============================================================  ============================  =================

A commit that replaces a checkpoint removes the old files in the same way: D1 before the new manifest, D4 and D5 after.
Before D2, a delete notes the tag of each object that later saves may write to, and removes only what has that tag. All
other files have names that no later save uses, or are compared with the manifest that is there by then.

The sweep removes each save that no manifest names: the rest of a delete that was cut off after D2, and saves that never
became complete. Their descriptions name their files. A save goes if its last write is older than a minimum age, and if
it is older than all live saves. A live save is refreshed well within that age: each drain that has a part in it writes
a description again until the save is committed or given up (:func:`refresh`). Before the sweep removes a file, it
reserves the place of the manifest. A drain that comes back at that moment can't commit, begins again, and misses its
files. An object that is newer than the descriptions of its save belongs to another writer, and stays.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.files import paths_in, read_index, written
from tiered_checkpoint_io.engine.durable.manifests import (
    DurableView,
    Manifests,
    contents_of,
    current,
    if_intact,
    repeated,
)
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    Reason,
    StoreError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import hash_bytes
from tiered_checkpoint_io.model.manifest import METADATA, Content, Manifest, Part
from tiered_checkpoint_io.model.retention import Checkpoint
from tiered_checkpoint_io.stores.base import ObjectInfo, Refusals, Store, conditional, delete_each, folders_of


class RemovalAttempt(NamedTuple):
    """Result of an attempt to remove a checkpoint.

    Unless ``is_gone``, it is unchanged: saved again since, in use, or refused. ``refusal`` is the server's error; of a
    checkpoint that is gone, about some of the files.
    """

    checkpoint: Checkpoint
    is_gone: bool
    refusal: TieredCheckpointError | None = None


@dataclass(slots=True)
class Survey:
    """Knowledge of the sweep and of retention about a durable tier; no manifest is read twice unless it changes.

    Attributes:
        locked: Unnamed saves that the server refuses to remove.
        due: Time of the next sweep, by the monotonic clock; ``logged`` is the error of the last, as it was logged.
        unread: After :meth:`look`, the names whose manifests can't be understood: they stay.
        refused: Checkpoints that the server refused to remove, and that were not reported yet.
        left_alone: Time until which the checkpoints of a step stay, as the server lately refused to remove one.
    """

    locked: set[str] = field(default_factory=set)
    due: float = -math.inf
    logged: str = ""
    unread: dict[str, CorruptCheckpointError] = field(default_factory=dict)
    refused: list[RemovalAttempt] = field(default_factory=list)
    left_alone: dict[int | str, float] = field(default_factory=dict)
    view: DurableView = field(default_factory=DurableView)

    def look(self, store: Store, *, clock: Clock = SYSTEM) -> list[Checkpoint]:
        """Returns all checkpoints and aliases."""
        read = self.view.look(store, clock)
        self.unread = {name: value for name, value in read.items() if isinstance(value, CorruptCheckpointError)}
        return [Checkpoint.of(value) for value in read.values() if isinstance(value, Manifest)]


_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _passing(*reasons: Reason) -> Iterator[None]:
    """Ends its block, without an error, if the block fails for one of these reasons."""
    try:
        yield
    except TieredCheckpointError as error:
        if error.reason not in reasons:
            raise


@dataclass(frozen=True, slots=True)
class Remains:
    """Objects that no manifest will name after the next change of a manifest."""

    name: str
    files: frozenset[str] = frozenset()
    #: Descriptions and indices.
    records: frozenset[str] = frozenset()
    #: Tags of the files that later saves may write to.
    tags: Mapping[str, str | None] = field(default_factory=dict)
    #: True if a file may have the name of a file of another save.
    has_common_names: bool = False

    @classmethod
    def of(cls, store: Store, name: str, contents: Collection[Content], *, but: Iterable[str] = ()) -> Remains:
        """Returns the objects of some contents, except the files that stay, after it has described them (D1)."""
        files, records, stays = set[str](), set[str](), set(but)
        for content in contents:
            paths = {entry.path for entry in content.files}.difference(stays)
            if content.index is not None:
                owner, recorded, known = _recorded(store, content.save_id)
                paths, records = recorded if owner == name else set(), records | known
                if name in paths - stays:
                    # The file is newer than its descriptions; a sweep would take it for another writer's.
                    refresh(store, content.save_id)
            elif paths:
                part = Part(name, max(content.coordinator, 0), content, "", durable=False)
                records.add(key := ids.description_key(content.save_id, part.rank))
                # Without room for it, the delete is about to make some.
                with _passing("full"):
                    store.put(key, part.to_json())
            files |= paths
        shared = {path for content in contents if (path := content.switch_path(name)) is not None} - stays
        tags = {path: conditional(store).tag(path) for path in sorted(shared)}
        marks = [hash_bytes(content.save_id.encode())[:8] for content in contents]
        own = {path for path in files if any(mark in path.rpartition("/")[2] for mark in marks)}
        common = bool(files - stays - shared - own)
        return cls(name, frozenset(files - stays), frozenset(records), tags, common)

    def remove(self, store: Store) -> TieredCheckpointError | None:
        """Removes the objects (D4, D5); returns and logs the error that leaves some of them for the sweep."""
        refused = Refusals()
        error: TieredCheckpointError | None = None
        try:
            files = self.files
            if self.has_common_names:
                live = paths_in(store, contents_of([current(store, self.name)]))
                files = self.files - live if live is not None else frozenset()
            with refused.kept():
                delete_all(store, files - self.tags.keys())
            for path, tag in self.tags.items():
                if tag is not None:
                    with refused.kept(), _passing("changed"):
                        conditional(store).delete_if(path, tag)
            if not refused:
                delete_all(store, self.records)
            error = refused[0] if refused else None
        except TieredCheckpointError as raised:
            error = raised
        if error is not None:
            _log.warning("files that %s no longer has are left for a later sweep: %s", self.name, error)
        return error


@repeated
def delete(
    store: Store, name: str, *, before: str | None = None, clock: Clock = SYSTEM
) -> tuple[bool, TieredCheckpointError | None]:
    """Makes a checkpoint, or an alias, cease to exist, and the aliases that point to it.

    A file that never had a manifest (of a save that was given up, or that others wrote) is removed too. A save made
    later than ``before``, the id of the request, stays. Repeat the call after a StoreError: the checkpoint is as it
    was. Nothing is removed either if another program uses the checkpoint (ConfigError), or it has another format
    version.

    Returns:
        True if the checkpoint ceased to exist; and the error that left files for the sweep.
    """
    manifests = Manifests(store, before or name)
    manifest = manifests.current(name)
    if manifest is None:
        remove_unnamed(manifests, name, name)
        # An unreadable manifest is no checkpoint either.
        manifests.delete(name)
        return True, None
    if before is not None and manifest.content.save_id > before:
        return False, None
    refuse_held(store, name, clock=clock)
    remains = Remains(name)
    if manifest.alias_of is None:
        remains = Remains.of(store, name, contents_of([manifest]))
    manifests.delete(name)
    try:
        refuse_held(store, name, clock=clock)
    except ConfigError as error:
        if error.reason != "held":
            raise
        manifests.put(replace(manifest, reserved=manifests.reserved(name)))
        raise
    return True, remove_aliases(manifests, manifest) or remains.remove(store)


def remove_aliases(manifests: Manifests, target: Manifest) -> StoreError | None:
    """Removes the manifests of the aliases of a checkpoint that is gone (D3); returns the error that left some."""
    try:
        for alias in target.aliases:
            there = manifests.current(alias) if target.alias_of is None else None
            if there is not None and there.alias_of == target.name:
                with _passing("changed"):
                    manifests.delete(alias)
    except StoreError as error:
        return error
    return None


def delete_all(store: Store, keys: Iterable[str]) -> None:
    """Removes objects, some of which may not be there: by few requests if the store has them, else by one each.

    Raises StoreError if some are still there; all that were not refused are gone. Repeat the call to finish.
    """
    todo, batched = sorted(keys), getattr(store, "delete_all", None)
    if batched is not None:
        batched(todo)
    else:
        delete_each(store.delete, todo)


def remove_unnamed(manifests: Manifests, name: str, path: str) -> None:
    """Removes a switch that no manifest names, or raises StoreError if the switch is being replaced.

    If its save is about to be committed, that fails: its manifest's place is reserved first.
    """
    tag = manifests.conditional.tag(path)
    if tag is not None:
        manifests.reserve(name)
        manifests.look(name)
        manifests.conditional.delete_if(path, tag)


# -------------------------------------------------------------------------------------------- sweep
def refresh(store: Store, save_id: str) -> bool:
    """Shows that a save is alive: writes one of its descriptions again; returns False if there is none."""
    for entry in store.list(ids.save_prefix(save_id)):
        # Another drain may do the same, or commit or sweep the save.
        with _passing("changed", "missing"):
            data, tag = conditional(store).get_tagged(entry.key)
            conditional(store).put_if(entry.key, data, tag)
        return True
    return False


def sweep(
    store: Store, survey: Survey, *, before: float, live: Iterable[str] = (), clock: Clock = SYSTEM
) -> list[tuple[str, str]]:
    """Removes the saves that no manifest names; returns the ids and names of those that are gone.

    A save that was written to since ``before``, by the store's own clock, stays; so do all saves later than a ``live``
    one. Raises StoreError if the tier refuses to remove some saves; all others are gone.
    """
    saves = {save_id for save_id in folders_of(store, ids.SAVES_PREFIX) if ids.is_save_id(save_id)}
    if not saves:
        return []
    manifests = survey.view.look(store, clock)
    own = [each for each in manifests.values() if isinstance(each, Manifest) and each.alias_of is None]
    named = {each.save_id for each in contents_of(own)}
    left = {each: list(store.list(ids.save_prefix(each))) for each in sorted(saves - named - survey.locked)}
    young = [each for each, entries in left.items() if entries and _newest(entries) >= before]
    oldest = min([*young, *live], default=None)
    gone, refused = [], Refusals()
    for save_id, entries in left.items():
        # A directory keeps empty folders.
        if not entries or (oldest is not None and save_id >= oldest):
            continue
        refusals = len(refused)
        with refused.kept(), _passing("changed", "format"):
            name = _remove_unnamed_save(store, save_id, entries, unread=manifests)
            if name is not None:
                gone.append((save_id, name))
        if len(refused) > refusals:
            # A refusal lasts, mostly: this process does not ask again.
            survey.locked.add(save_id)
    refused.raise_first()
    return gone


def _remove_unnamed_save(
    store: Store, save_id: str, entries: Sequence[ObjectInfo], unread: Mapping[str, Manifest | CorruptCheckpointError]
) -> str | None:
    """Removes a save that no manifest names; returns its name, or None if it stays."""
    name, paths, _ = _recorded(store, save_id)
    if name:
        manifests = Manifests(store, save_id)
        manifest = manifests.current(name)
        contents = contents_of([manifest])
        live = paths_in(store, contents)
        is_unread = manifest is None and isinstance(unread.get(name), CorruptCheckpointError)
        # The save was committed since, or the files of the name are not known.
        if live is None or is_unread or any(content.save_id == save_id for content in contents):
            return None
        manifests.reserve(name)
        switch, newest = f"{name}/{METADATA}", _newest(entries)
        there = {entry.key: entry.modified for entry in store.list(f"{name}/")}
        if name in paths - live:
            there[name] = written(store, name)
        delete_all(store, {path for path in paths - live if path != switch and 0 < there.get(path, 0) <= newest})
        if switch in paths - live:
            remove_unnamed(manifests, name, switch)
    delete_all(store, (entry.key for entry in entries))
    return name


def _recorded(store: Store, save_id: str) -> tuple[str, set[str], set[str]]:
    """Returns the name of a save ("" if no record of it is intact), its files, and the keys of its records."""
    key = ids.index_key(save_id)
    index = if_intact(read_index, store, save_id)
    if index is not None and index.save_id == save_id:
        records = {ids.description_key(save_id, rank) for rank in index.rows}
        return index.name, _below(index.name, (path for path, _ in index.paths)), records | {key}
    records = {entry.key for entry in store.list(ids.save_prefix(save_id))}

    def read(each: str) -> Part | None:
        return if_intact(lambda: Part.from_json(store.get(each), where=each))

    parts = [
        part for part in in_parallel(read, sorted(records - {key})) if part is not None and part.save_id == save_id
    ]
    name = next((part.name for part in parts), "")
    return name, _below(name, (entry.path for part in parts for entry in part.content.files)), records


def _below(name: str, paths: Iterable[str]) -> set[str]:
    """Returns the paths that a checkpoint of this name may have."""
    return {path for path in paths if path == name or path.startswith(f"{name}/")}


def _newest(entries: Iterable[ObjectInfo]) -> float:
    return max(entry.modified for entry in entries)


# -------------------------------------------------------------------------------------------- holds
# A delete looks for holds before it removes the manifest, and again before it removes any file; a hold looks for the
# manifest after its own write. So if the two meet, the delete puts the manifest back, or the hold is refused.

#: Age at which a hold no longer counts: its program did not live to release it.
LIFETIME_S = 24 * 3600.0


def hold(store: Store, name: str, save_id: str, *, clock: Clock = SYSTEM) -> str:
    """Keeps a save from being deleted under its name; returns the key that :func:`release` takes.

    If the name has no checkpoint, or another save's, this raises CheckpointNotFoundError, and holds nothing.
    """
    key = ids.hold_prefix(name) + clock.token(8)
    store.put(key, b"{}")
    manifest = current(store, name)
    if manifest is None or manifest.settled.save_id != save_id:
        store.delete(key)
        text = f"{name} was deleted or overwritten, so nothing is held"
        raise CheckpointNotFoundError(text, operation="hold", tier="durable", key=name)
    return key


def release(store: Store, key: str) -> None:
    """Ends a hold; a checkpoint that had to go without it goes at the next retention or prune."""
    store.delete(key)


def refuse_held(store: Store, name: str, *, clock: Clock = SYSTEM) -> None:
    """Raises ConfigError if a checkpoint is held: one list. Removes expired holds."""
    prefix, now = ids.hold_prefix(name), clock.wall()
    for entry in store.list(prefix):
        if "/" in entry.key.removeprefix(prefix):
            # The hold of a replaced checkpoint.
            continue
        if now - entry.modified < LIFETIME_S:
            raise ConfigError(
                f"{name} is in use by another program",
                operation="delete",
                tier="durable",
                key=entry.key,
                hint="it stays; the next retention or `tiered-ckpt prune` after that removes it",
                reason="held",
            )
        # A hold that can't be removed does not count all the same.
        with Refusals().kept():
            store.delete(entry.key)
