"""Parts that other nodes hold, read whole into this node's memory: verified, and from the next copy if one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from tiered_checkpoint_io.engine.chunks import Copies, Copy, writer_to
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.manifest import FileEntry, Part
from tiered_checkpoint_io.stores.base import Readable
from tiered_checkpoint_io.stores.peer import PeerStore

_T_co = TypeVar("_T_co", covariant=True)
_T = TypeVar("_T")
#: Ranges of one peer that are read at once.
RANGES = 4


class Destination(Protocol[_T_co]):
    """Destination of a part that arrives."""

    def open(self) -> contextlib.AbstractContextManager[Mapping[str, memoryview]]:
        """Makes room for its files, by basename."""
        ...

    def fresh(self, basename: str) -> int | None:
        """Returns a descriptor of a file of which no page was touched yet."""
        ...

    def keep(self) -> _T_co:
        """Makes the part exist, once all files have arrived and :meth:`open`'s block has ended."""
        ...

    def drop(self) -> None:
        """Frees the part's room."""
        ...


class SlotDestination:
    """Slots of a memory tier, in which a part becomes this node's."""

    def __init__(
        self, tier: MemoryTier, part: Part, *, drained: bool = False, acquire: Callable[[int], Slot] | None = None
    ) -> None:
        """Takes no room yet.

        Args:
            tier: This node's memory, or its replicas.
            part: Part that arrives.
            drained: True if this node need not upload the part.
            acquire: Returns a slot of a size; the tier's function by default.
        """
        self._tier = tier
        self._part = part
        self._drained = drained
        self._acquire = acquire or tier.acquire
        self._slots: dict[str, Slot] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[str, memoryview]]:
        with contextlib.ExitStack() as held:
            views: dict[str, memoryview] = {}
            for entry in self._part.content.files:
                slot = self._slots[entry.basename] = self._acquire(max(1, entry.size))
                views[entry.basename] = held.enter_context(slot.view)
            yield views

    def fresh(self, basename: str) -> int | None:
        """Returns a descriptor of a file, if none of its pages was touched yet."""
        slot = self._slots.get(basename)
        return slot.descriptor if slot is not None and not slot.touched else None

    def keep(self) -> StoredPart:
        try:
            return self._tier.commit(self._part, self._slots, drained=self._drained, saved=False)
        except MemoryFullError:
            # The tier has given up the slots as well.
            self._slots.clear()
            raise

    def drop(self) -> None:
        for slot in self._slots.values():
            self._tier.give_back(slot)
        self._slots.clear()


def describe(store: PeerStore, save_id: str, rank: int) -> Part:
    """Returns the description of a part that a peer holds.

    Raises:
        StoreError: The peer does not have the part, or does not answer.
        CorruptCheckpointError: This release can't understand the description.
    """
    key = f"{save_id}/{rank}"
    part = Part.from_json(store.get(key), where=f"{store.url}/{key}")
    if (part.save_id, part.rank) != (save_id, rank):
        raise CorruptCheckpointError("the peer describes another part", key=f"{store.url}/{key}")
    return part


def copies_of(part: Part, entry: FileEntry, stores: Sequence[PeerStore]) -> list[Copy]:
    """Returns the copies of a part's file that peers hold."""
    names = [each.basename for each in part.content.files]
    key = f"{part.save_id}/{part.rank}/{names.index(entry.basename)}"
    return [Copy(lambda store=store: store, key) for store in stores]  # type: ignore[misc]


def not_taken(note: Callable[[str], None]) -> Callable[[Readable, FileEntry, Exception], None]:
    """Returns a callback that notes a rejected copy; if the copy is damaged, its node is to verify it."""

    def skipped(store: Readable, entry: FileEntry, error: Exception) -> None:
        note(f"{store.url}: {error}")
        if isinstance(store, PeerStore) and isinstance(error, CorruptCheckpointError):
            store.report_damage(entry.path)

    return skipped


def read_part(
    part: Part,
    stores: Sequence[PeerStore],
    destination: Destination[_T],
    progress: Callable[[int], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> _T:
    """Reads a part whole, verified.

    Args:
        part: Its description.
        stores: The peers that hold it, in the order in which to read them.
        destination: Destination of the part.
        progress: Called with the number of each chunk that has come, from any thread.
        note: Called with the reason why a peer's copy is not taken.

    Raises:
        CorruptCheckpointError: No peer has all of it intact.
        MemoryTierError: There is no room for it, or its place is taken.
    """
    try:
        with destination.open() as views:
            for entry in part.content.files:
                fresh = destination.fresh(entry.basename)
                write = writer_to(fresh) if fresh is not None else None
                copies = Copies(entry, copies_of(part, entry, stores), not_taken(note))
                copies.fetch(views[entry.basename], concurrency=RANGES, write=write, progress=progress)
        return destination.keep()
    except BaseException:
        destination.drop()
        raise
