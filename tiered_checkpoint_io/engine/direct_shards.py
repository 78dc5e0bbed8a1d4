"""A rank's part of a sharded checkpoint where node memory has no room for it: straight to the durable tier.

The process uploads it by itself, in an asynchronous save behind that; the coordinator then commits, in
place of its node's drain. Ranks that do have room go through memory as ever.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping

from tiered_checkpoint_io.engine import commit_sharded
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.image import Image
from tiered_checkpoint_io.manifest import Part
from tiered_checkpoint_io.storage.base import Store
from tiered_checkpoint_io.storage.node import refuse_beyond_memory

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

    def put(self, store: Store, part: Part, basename: str, small: Mapping[str, bytes], *, timeout_s: float) -> None:
        """As :func:`put_part` does, with this file as ``basename`` beside ``small`` ones. Frees the memory."""
        try:
            with memoryview(self._buffer) as view, view.toreadonly() as data:
                files = {name: memoryview(content) for name, content in small.items()} | {basename: data}
                put_part(store, part, files, timeout_s=timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        """Frees the memory."""
        self._buffer.close()


def put_part(store: Store, part: Part, files: Mapping[str, memoryview], *, timeout_s: float) -> None:
    """Brings a part to the durable tier; the coordinator's is followed by the commit.

    Args:
        store: Where.
        part: The whole part.
        files: The bytes of all its files, by basename.
        timeout_s: How long the coordinator waits for the parts of other ranks.

    Raises:
        SaveError: They have not come, or a later save has taken the name.
        TieredCheckpointError: As :func:`commit_sharded.put_part` and ``commit_parts``.
    """
    journal = _Journal()
    fate = commit_sharded.put_part(store, part, files, journal=journal)
    if fate == "replaced":
        raise _refused(part, "a later save has taken its name", "give each save a name of its own")
    if part.commits and fate == "sent":
        _wait(store, part, timeout_s)
        commit_sharded.commit_parts(store, part, files, journal=journal)


class _Journal:
    """What an upload notes of itself; nobody takes this one up, for what it uploads dies with the process."""

    def __init__(self) -> None:
        self._state: dict[str, object] | None = None

    def read(self) -> dict[str, object] | None:
        return self._state

    def write(self, state: dict[str, object]) -> None:
        self._state = state

    def clear(self) -> None:
        self._state = None


def _wait(store: Store, part: Part, timeout_s: float) -> None:
    """Returns once the parts of all ranks are there."""
    end, interval = time.monotonic() + timeout_s, _FIRST_LOOK_S
    while missing := commit_sharded.missing_ranks(part, commit_sharded.arrived(store)):
        if time.monotonic() >= end:
            named = ", ".join(map(str, missing[:16]))
            raise _refused(
                part,
                f"the parts of {len(missing)} of {part.content.world_size} ranks have not come"
                f" within {timeout_s:.0f} s: {named}",
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
