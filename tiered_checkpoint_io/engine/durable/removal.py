"""What goes once a manifest has changed: noted before the change, removed behind it, against a crash in between."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from tiered_checkpoint_io.engine.durable.files import parse_description, paths_in
from tiered_checkpoint_io.engine.durable.manifests import contents_of, current, in_parallel
from tiered_checkpoint_io.errors import CorruptCheckpointError, FormatVersionError, ManifestError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.index import Index
from tiered_checkpoint_io.model.manifest import Content, Manifest
from tiered_checkpoint_io.stores.base import Store, UploadJournal

_OBJECTS = "objects"
_SAVES = "saves"
_OWNER = "owner"
_MANIFEST = "manifest"


class Section:
    """One entry of a journal, as a journal of its own; without a journal, nothing is remembered."""

    def __init__(self, journal: UploadJournal | None, name: str) -> None:
        self._journal = journal
        self._name = name

    def read(self) -> dict[str, object] | None:
        state = self._all().get(self._name)
        return state if isinstance(state, dict) else None

    def write(self, state: dict[str, object]) -> None:
        if self._journal is not None:
            self._journal.write({**self._all(), self._name: state})

    def clear(self) -> None:
        state = self._all()
        if self._journal is None or self._name not in state:
            return
        del state[self._name]
        if state:
            self._journal.write(state)
        else:
            self._journal.clear()

    def _all(self) -> dict[str, object]:
        return (self._journal.read() if self._journal is not None else None) or {}


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to go once a manifest has changed.

    Attributes:
        owner: The checkpoint whose files they were.
        objects: Keys of files that the manifest listed itself.
        saves: Saves whose index lists their files; the index goes last, so that a later try finds the list.
        identity: Which manifest named them, where that matters: see :func:`identity_of`.
    """

    owner: str
    objects: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    identity: tuple[str | None, ...] | None = None

    @classmethod
    def of(cls, owner: str, contents: Collection[Content]) -> Removal:
        """All files of some contents."""
        paths = {entry.path for content in contents for entry in content.files}
        indexed = {content.save_id for content in contents if content.index is not None}
        return cls(owner, tuple(sorted(paths)), tuple(sorted(indexed)))

    def without(self, paths: Iterable[str]) -> Removal:
        """The same, but for files that stay."""
        return replace(self, objects=tuple(sorted(set(self.objects).difference(paths))))

    @classmethod
    def noted(cls, journal: UploadJournal | None) -> Removal | None:
        """What an earlier try noted; None where it did not get so far."""
        state = (journal.read() if journal is not None else None) or {}
        objects, owner, identity = state.get(_OBJECTS), state.get(_OWNER), state.get(_MANIFEST)
        saves = state.get(_SAVES, [])
        if not isinstance(objects, list) or not isinstance(saves, list) or not isinstance(owner, str):
            return None
        known = tuple(identity) if isinstance(identity, list) else None
        return cls(owner, tuple(map(str, objects)), tuple(map(str, saves)), known)

    def note(self, journal: UploadJournal | None) -> None:
        """Notes it for a later try, in place of what an earlier one noted."""
        if journal is None:
            return
        if not self.objects and not self.saves and self.identity is None:
            journal.clear()
        else:
            identity = list(self.identity) if self.identity is not None else None
            state: dict[str, object] = {_OBJECTS: list(self.objects), _OWNER: self.owner, _MANIFEST: identity}
            journal.write({**state, _SAVES: list(self.saves)} if self.saves else state)

    def finish(self, store: Store, journal: UploadJournal | None) -> None:
        """Removes what no save has taken since, and forgets the note."""
        if self.objects or self.saves:
            # A note may be older than a save that has taken the same name since.
            manifest = current(store, self.owner)
            own = contents_of([manifest]) if manifest is not None and manifest.alias_of is None else []
            live = live_paths(store, own)
            if live is not None:
                in_parallel(store.delete, [path for path in self.objects if path not in live])
                for save_id in self.saves:
                    if all(content.save_id != save_id for content in own):
                        remove_save(store, self.owner, save_id, live)
        if journal is not None:
            journal.clear()


def live_paths(store: Store, contents: Collection[Content]) -> set[str] | None:
    """The files of contents that stay; None where the index of one is damaged, and nothing near it may go."""
    try:
        return paths_in(store, contents)
    except CorruptCheckpointError:
        return None


def remove_save(store: Store, name: str, save_id: str, live: Collection[str]) -> None:
    """Removes the files of a save that no manifest names, then its descriptions, then its index.

    Args:
        store: The durable tier.
        name: The checkpoint's name.
        save_id: Which save.
        live: Files that stay: another save of the name has them too.

    Raises:
        FormatVersionError: A newer release described it. Nothing was removed.
        StoreError: Repeat the call to finish.
    """
    key = ids.index_key(save_id)
    index = _index_of(store, name, key)
    if index is not None:
        paths = {path for path, _ in index.paths}
        described = [ids.description_key(save_id, rank) for rank in index.rows]
    else:
        # It never was complete: what it has is told by the descriptions that came.
        described = [entry.key for entry in store.list(ids.save_prefix(save_id)) if entry.key != key]
        found = in_parallel(lambda each: _described(store, name, save_id, each), described)
        paths = {path for each in found for path in each}
    in_parallel(store.delete, sorted(paths.difference(live)))
    in_parallel(store.delete, described)
    store.delete(key)


def _index_of(store: Store, name: str, key: str) -> Index | None:
    """The index of a save; None where there is no intact one."""
    try:
        index = Index.from_json(store.get(key), where=f"{store.url}/{key}")
    except StoreNotFoundError:
        return None
    except FormatVersionError:
        raise
    except ManifestError:
        return None
    return index if index.name == name else None


def _described(store: Store, name: str, save_id: str, key: str) -> set[str]:
    """The files of a part; none where nobody can tell any more what it named."""
    rank = ids.rank_of_description(key)
    if rank is None:
        return set()
    try:
        part = parse_description(store.get(key), name, save_id, rank, where=f"{store.url}/{key}")
    except FormatVersionError:
        raise
    except (ManifestError, StoreNotFoundError):
        return set()
    return {entry.path for entry in part.content.files}


def identity_of(manifest: Manifest) -> tuple[str | None, ...]:
    """What tells a manifest from a later one of the same name."""
    return (manifest.content.save_id, manifest.alias_of)
