"""A rank's part of a sharded or local checkpoint where node memory has no room for it: straight to the durable tier.

The process uploads it by itself, in an asynchronous save behind that; the coordinator then commits, in
place of its node's drain. Ranks that do have room go through memory as ever.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Mapping

from tiered_checkpoint_io.engine.durable import commit_sharded
from tiered_checkpoint_io.engine.durable.commit_sharded import Arrived
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.node import refuse_beyond_memory
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores.base import Store, UploadJournal

_FIRST_LOOK_S = 0.1
_MAX_LOOK_S = 2.0


class DirectFile:
    """A rank's file in memory of this process alone.

    Attributes:
        hashes: Of its chunks.
    """

    def __init__(self, image: Image, *, threads: int | None = None) -> None:
        """Captures the state.

        Args:
            image: The file, of one byte at least.
            threads: How many threads copy.

        Raises:
            MemoryFullError: The node has no memory left for it.
        """
        refuse_beyond_memory(image.size, operation="save")
        self._buffer = mmap.mmap(-1, image.size)
        try:
            with memoryview(self._buffer) as view:
                self.hashes = image.fill(view, threads=threads)
        except BaseException:
            self._buffer.close()
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[memoryview]:
        """The bytes of the file, whose memory is free behind the block."""
        try:
            with memoryview(self._buffer) as view, view.toreadonly() as data:
                yield data
        finally:
            self.close()

    def close(self) -> None:
        """Frees the memory."""
        self._buffer.close()


class DirectSlot:
    """A rank's file that lies in node memory already, but for whose description there is no room."""

    def __init__(self, tier: MemoryTier, slot: Slot, size: int) -> None:
        """Takes a slot that :meth:`MemoryTier.commit` has left to its caller.

        Args:
            tier: Whose slot it is.
            slot: The slot.
            size: Bytes of the file.
        """
        self._tier = tier
        self._slot = slot
        self._size = size

    @contextlib.contextmanager
    def reading(self) -> Iterator[memoryview]:
        """As :meth:`DirectFile.reading`."""
        try:
            # One by one, so that all views have ended when the slot is given back.
            with self._slot.view as whole, whole[: self._size] as view, view.toreadonly() as data:
                yield data
        finally:
            self.close()

    def close(self) -> None:
        """Gives the slot back."""
        self._tier.give_back(self._slot)


def send(store: Store, part: Part, files: Mapping[str, memoryview], journal: UploadJournal) -> bool:
    """Brings a part to the durable tier; whether it is the coordinator's, and still to be committed.

    Args:
        store: Where.
        part: The whole part.
        files: The bytes of all its files, by basename.
        journal: Remembers what has arrived.

    Raises:
        SaveError: A later save has taken the name.
        TieredCheckpointError: As :func:`commit_sharded.put_part`.
    """
    fate = commit_sharded.put_part(store, part, files, journal=journal)
    if fate == "replaced":
        raise _refused(part, "a later save has taken its name", "give each save a name of its own")
    return part.commits and fate == "sent"


class Journal:
    """What an upload notes of itself; nobody takes this one up, for what it uploads dies with the process."""

    def __init__(self) -> None:
        self._state: dict[str, object] | None = None

    def read(self) -> dict[str, object] | None:
        return self._state

    def write(self, state: dict[str, object]) -> None:
        self._state = state

    def clear(self) -> None:
        self._state = None


def await_parts(store: Store, part: Part, *, timeout_s: float, is_hopeless: Callable[[], bool]) -> list[Arrived]:
    """Waits for the parts of all other ranks.

    Args:
        store: The durable tier.
        part: The coordinator's part, behind :func:`send`.
        timeout_s: For how long, seconds.
        is_hopeless: Whether some of them will not come; asked at each look.

    Returns:
        The parts that are there by then, of other saves as well.

    Raises:
        SaveError: They have not come, or will not.
        StoreError: The tier could not be asked.
    """
    end, interval = time.monotonic() + timeout_s, _FIRST_LOOK_S
    while True:
        # Asked first: what arrived before somebody gave up is not lost.
        gives_up = is_hopeless()
        there = commit_sharded.arrived(store)
        missing = commit_sharded.missing_ranks(part, there)
        if not missing:
            return there
        if gives_up or time.monotonic() >= end:
            named = ", ".join(map(str, missing[:16]))
            why = "are not there, and some were given up" if gives_up else f"have not come within {timeout_s:.0f} s"
            raise _refused(
                part,
                f"the parts of {len(missing)} of {part.content.world_size} ranks {why}: {named}",
                "see the logs of those ranks and of the drains of their nodes",
            )
        time.sleep(interval)
        interval = min(_MAX_LOOK_S, 2 * interval)


def _refused(part: Part, what: str, hint: str) -> SaveError:
    return SaveError(
        what,
        operation="commit",
        tier="durable",
        key=f"{part.dirpath}/{part.name}",
        rank=part.rank,
        step=part.content.step,
        hint=hint,
    )
