"""What is noted of a sequence of writes, so that a crash between two of them is taken up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiered_checkpoint_io.engine.durable.manifests import current, in_parallel, paths_of
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.base import Store, UploadJournal

_OBJECTS = "objects"
_OWNER = "owner"
_MANIFEST = "manifest"


class Section:
    """One entry of a journal, as a journal of its own."""

    def __init__(self, journal: UploadJournal, name: str) -> None:
        self._journal = journal
        self._name = name

    def read(self) -> dict[str, object] | None:
        state = (self._journal.read() or {}).get(self._name)
        return state if isinstance(state, dict) else None

    def write(self, state: dict[str, object]) -> None:
        self._journal.write({**(self._journal.read() or {}), self._name: state})

    def clear(self) -> None:
        state = self._journal.read()
        if state is None or self._name not in state:
            return
        del state[self._name]
        if state:
            self._journal.write(state)
        else:
            self._journal.clear()


@dataclass(frozen=True, slots=True)
class Removal:
    """Objects to remove once a manifest has changed: noted before the change, removed behind it.

    Attributes:
        owner: The checkpoint whose files they were.
        objects: Their keys.
        identity: Which manifest named them, where that matters: see :func:`identity_of`.
    """

    owner: str
    objects: tuple[str, ...] = ()
    identity: tuple[str | None, ...] | None = None

    @classmethod
    def noted(cls, journal: UploadJournal | None) -> Removal | None:
        """What an earlier try noted; None where it did not get so far."""
        state = (journal.read() if journal is not None else None) or {}
        objects, owner, identity = state.get(_OBJECTS), state.get(_OWNER), state.get(_MANIFEST)
        if not isinstance(objects, list) or not isinstance(owner, str):
            return None
        return cls(owner, tuple(map(str, objects)), tuple(identity) if isinstance(identity, list) else None)

    def note(self, journal: UploadJournal | None) -> None:
        """Notes it for a later try, in place of what an earlier one noted."""
        if journal is not None and not self.objects and self.identity is None:
            journal.clear()
        elif journal is not None:
            identity = list(self.identity) if self.identity is not None else None
            journal.write({_OBJECTS: list(self.objects), _OWNER: self.owner, _MANIFEST: identity})

    def finish(self, store: Store, journal: UploadJournal | None) -> None:
        """Removes what no save has taken since, and forgets the note."""
        if self.objects:
            # A note may be older than a save that has taken the same name since.
            manifest = current(store, self.owner)
            live: Collection[str] = paths_of(manifest) if manifest is not None and manifest.alias_of is None else ()
            in_parallel(store.delete, [path for path in self.objects if path not in live])
        if journal is not None:
            journal.clear()


def identity_of(manifest: Manifest) -> tuple[str | None, ...]:
    """What tells a manifest from a later one of the same name."""
    return (manifest.content.save_id, manifest.alias_of)
