"""What is removed once a manifest has changed: noted before the change, so that a crash in between loses nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from tiered_checkpoint_io.engine.durable.files import paths_in, read_description, read_index
from tiered_checkpoint_io.engine.durable.manifests import Manifests, contents_of, current, if_intact
from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Manifest, Part
from tiered_checkpoint_io.stores.base import Store, UploadJournal
from tiered_checkpoint_io.stores.fallbacks import conditional
from tiered_checkpoint_io.stores.refusals import Refusals, delete_each

#: The section of an operation's journal that says what is to go.
REMOVAL = "removal"
#: Takes what could not be removed, and why; whether it sees to that.
Later: TypeAlias = "Callable[[Removal, StoreError], bool] | None"
_NO_TAGS: Mapping[str, str | None] = MappingProxyType({})


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
        if self._journal is None or state.pop(self._name, None) is None:
            return
        if state:
            self._journal.write(state)
        else:
            self._journal.clear()

    def _all(self) -> dict[str, object]:
        return (self._journal.read() if self._journal is not None else None) or {}


class StoreJournal:
    """A journal on the durable tier itself, for one process at a time: it holds the lease."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._state: dict[str, object] | None = None
        self._is_read = False

    def read(self) -> dict[str, object] | None:
        if not self._is_read:
            # One that is damaged tells nothing.
            with contextlib.suppress(StoreNotFoundError, ValueError):
                state = json.loads(self._store.get(self._key))
                self._state = state if isinstance(state, dict) else None
            self._is_read = True
        return self._state

    def write(self, state: dict[str, object]) -> None:
        # Where there is no room for it, what it notes is about to make some.
        try:
            self._store.put(self._key, json.dumps(state).encode())
        except StoreError as error:
            if error.reason != "full":
                raise
        self._state, self._is_read = state, True

    def clear(self) -> None:
        self._store.delete(self._key)
        self._state, self._is_read = None, True


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to go once a manifest has changed.

    Attributes:
        owner: The checkpoint whose files they were.
        objects: Keys of files that the manifest listed itself.
        saves: Saves whose index lists their files; the index goes last, so that a later try finds the list.
        tags: Of keys that other saves may write to as well, what is to go there; None where there is nothing.
        replaced: The save that had the name, where another one took it.
    """

    owner: str
    objects: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    tags: Mapping[str, str | None] = field(default_factory=dict)
    replaced: str = ""

    @classmethod
    def of(cls, store: Store, owner: str, contents: Collection[Content], *, but: Iterable[str] = ()) -> Removal:
        """All files of some contents, but for those that stay, as they are before the manifest changes."""
        paths = {entry.path for content in contents for entry in content.files}.difference(but)
        indexed = {content.save_id for content in contents if content.index is not None}
        shared = {path for content in contents if (path := content.switch_path(owner)) is not None}.difference(but)
        tags = {path: conditional(store).tag(path) for path in sorted(shared)}
        return cls(owner, tuple(sorted(paths)), tuple(sorted(indexed)), tags)

    @classmethod
    def noted(cls, owner: str, note: Section) -> Removal:
        """What an earlier try noted; nothing where it did not get so far."""
        state: Any = note.read() or {}
        objects, saves, tags = (state.get(key, ()) for key in ("objects", "saves", "tags"))
        owner, replaced = state.get("owner", owner), str(state.get("replaced", ""))
        return cls(owner, tuple(objects), tuple(saves), dict(tags), replaced)

    @property
    def is_empty(self) -> bool:
        return not self.objects and not self.saves

    def note(self, note: Section) -> None:
        """Notes it for a later try, in place of what an earlier one noted."""
        if self.is_empty:
            note.clear()
        else:
            note.write(asdict(self))

    def noted_of(self, old: Manifest | None, note: Section) -> Removal:
        """The same, noted with the save that had the name."""
        removal = replace(self, replaced=old.content.save_id if old is not None else "")
        removal.note(note)
        return removal

    def finish(self, store: Store, note: Section, later: Later = None) -> None:
        """Removes what no save has taken since, and forgets the note.

        Where that fails, ``later`` is called, if it is given; whether it takes care of that.
        """
        try:
            self._carry_out(store)
        except StoreError as error:
            if error.reason == "changed" or later is None or not later(self, error):
                raise
        note.clear()

    def _carry_out(self, store: Store) -> None:
        if not self.is_empty:
            # A note may be older than a save that has taken the same name since.
            manifest = current(store, self.owner)
            own = contents_of([manifest]) if manifest is not None and manifest.alias_of is None else []
            live = paths_in(store, own)
            if live is not None:
                refused = Refusals()
                with refused.kept():
                    remove_files(store, set(self.objects).difference(live), self.tags)
                for save_id in self.saves:
                    if all(content.save_id != save_id for content in own):
                        with refused.kept():
                            remove_save(store, self.owner, save_id, live, self.tags)
                refused.raise_first()


def finish_noted(store: Store, owner: str, note: Section, later: Later = None) -> None:
    """Carries out what an earlier try noted, but where aliases have the files by now.

    An alias may have been set just before the manifest went, and the try cut off before it found that.

    Raises:
        CorruptCheckpointError, StoreError: A manifest can't be read that may be such an alias. What was noted
            stays.
        StoreError: As :meth:`Removal.finish`.
    """
    removal = Removal.noted(owner, note)
    if not removal.is_empty and current(store, removal.owner) is None:
        removal = Removal(removal.owner) if Manifests(store, removal.owner).heirs(removal.owner) else removal
    removal.finish(store, note, later)


def delete_all(store: Store, keys: Iterable[str]) -> None:
    """Removes objects, some of which may not be there: by few requests where the store has them, else by one each.

    Raises:
        StoreError: Some are still there: where they are refused, all others are gone. Repeat the call to finish.
    """
    todo, batched = sorted(keys), getattr(store, "delete_all", None)
    if batched is not None:
        batched(todo)
    else:
        delete_each(store.delete, todo)


def remove_files(store: Store, paths: Collection[str], tags: Mapping[str, str | None]) -> None:
    """Removes files; of those that have a tag, what had it, as others may have written there since.

    Raises as :func:`delete_all`.
    """
    refused = Refusals()
    with refused.kept():
        delete_all(store, (path for path in paths if path not in tags))
    for path in sorted(tags.keys() & paths):
        if (tag := tags[path]) is not None:
            try:
                with refused.kept():
                    conditional(store).delete_if(path, tag)
            except StoreError as error:
                if error.reason != "changed":
                    raise
    refused.raise_first()


def remove_unnamed(manifests: Manifests, name: str, path: str) -> None:
    """Removes a switch that no manifest names.

    It may be of a save that is about to be committed: the place of its manifest is reserved first, so that this fails.

    Raises:
        StoreError: It is being replaced. Nothing was removed.
    """
    tag = manifests.conditional.tag(path)
    if tag is not None:
        manifests.reserve(name)
        manifests.look(name)
        manifests.conditional.delete_if(path, tag)


def remove_save(
    store: Store, name: str, save_id: str, live: Collection[str], tags: Mapping[str, str | None] = _NO_TAGS
) -> None:
    """Removes the files of a save that no manifest names, but for ``live`` ones, then its descriptions and index.

    Of files with ``tags``, those that have them.

    Raises:
        CorruptCheckpointError: Its description has another format version. Nothing was removed.
        StoreError: Repeat the call to finish.
    """
    key = ids.index_key(save_id)
    index = if_intact(read_index, store, save_id)
    if index is not None and index.name == name:
        paths = {path for path, _ in index.paths}
        described = [ids.description_key(save_id, rank) for rank in index.rows]
    else:
        # It never was complete: the descriptions that came list its files.
        described = [entry.key for entry in store.list(ids.save_prefix(save_id)) if entry.key != key]
        parts = in_parallel(lambda each: if_intact(_part_at, store, name, save_id, each), described)
        paths = {entry.path for part in parts if part is not None for entry in part.content.files}
    remove_files(store, paths.difference(live), tags)
    delete_all(store, described)
    store.delete(key)


def _part_at(store: Store, name: str, save_id: str, key: str) -> Part:
    rank = ids.rank_of_description(key)
    if rank is None:
        raise CorruptCheckpointError("not the description of a part", operation="parse", key=f"{store.url}/{key}")
    return read_description(store, name, save_id, rank)
