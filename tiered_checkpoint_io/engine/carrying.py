"""Whole files from one rank's memory to another's, in a restore: on the main thread, with all ranks there.

Every rank knows from the plan what it sends and receives, and in which order. Whatever goes wrong on one side,
as many bytes are sent and received as planned: nobody is left waiting. Each chunk is verified where it arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from tiered_checkpoint_io.engine.coordination import Group
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MemoryFullError,
    MemoryTierError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.manifest import FileEntry, Part
from tiered_checkpoint_io.storage.memory import MemoryTier, StoredPart
from tiered_checkpoint_io.storage.slots import Slot

_HASH_THREADS = 2


def find_part(tier: MemoryTier, save_id: str, rank: int | None = None) -> StoredPart:
    """A part in this node's memory: its own, or a copy that it keeps.

    Args:
        tier: This node's memory.
        save_id: Of which save.
        rank: Whose; any part where it is None.

    Raises:
        CheckpointNotFoundError: There is none, or no longer.
    """
    for stored in (*tier.parts(), *tier.replicas.parts()):
        if stored.save_id == save_id and rank in (None, stored.part.rank):
            return stored
    raise CheckpointNotFoundError("no longer in memory", operation="restore", tier="memory", key=save_id)


def send_part(group: Group, tier: MemoryTier, part: Part, target: int) -> TieredCheckpointError | None:
    """Sends all files of a part that this node holds; gives what was wrong with them.

    What is damaged is quarantined, and travels all the same: the other side finds it out as well.
    """
    views: Mapping[str, memoryview] = {}
    problem: TieredCheckpointError | None = None
    with contextlib.ExitStack() as held:
        try:
            stored = find_part(tier, part.save_id, part.rank)
            views = held.enter_context(tier.reading(stored))
        except (CheckpointNotFoundError, CorruptCheckpointError) as error:
            problem = error
        checks = held.enter_context(contextlib.closing(_Checks()))
        for entry in part.content.files:
            for index, (offset, length) in enumerate(entry.chunks):
                if not length:
                    continue
                if entry.basename not in views:
                    group.send(memoryview(bytes(length)), target)
                    continue
                chunk = views[entry.basename][offset : offset + length]
                checks.add(entry, index, chunk, tier="memory", where=str(stored.file(entry.basename)))
                group.send(chunk, target)
        problem = problem or checks.damage()
    if isinstance(problem, CorruptCheckpointError):
        with contextlib.suppress(OSError):
            tier.quarantine(stored.folder, str(problem))
    return problem


def receive_file(group: Group, entry: FileEntry, view: memoryview | None, source: int) -> None:
    """Receives one file into ``view``; into nothing where that is None.

    Raises:
        CorruptCheckpointError: A chunk differs from its hash; all of them were received.
        RestoreError: The source is gone.
    """
    with contextlib.closing(_Checks()) as checks:
        for index, (offset, length) in enumerate(entry.chunks):
            if length and view is None:
                # Nowhere to put it, but the sender has to get rid of it.
                group.receive(bytearray(length), source)
            elif length and view is not None:
                chunk = view[offset : offset + length]
                group.receive(chunk, source)
                checks.add(entry, index, chunk, tier="peer", where=f"rank {source}")
        damage = checks.damage()
    if damage is not None:
        raise damage


class _Checks:
    """Hashes chunks while others are on their way."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="tiered-check")
        self._jobs: list[Future[None]] = []

    def close(self) -> None:
        self._pool.shutdown()

    def add(self, entry: FileEntry, index: int, chunk: memoryview, *, tier: str, where: str) -> None:
        """Begins with a chunk."""
        self._jobs.append(self._pool.submit(entry.check_chunk, index, chunk, tier=tier, where=where))

    def damage(self) -> CorruptCheckpointError | None:
        """Waits for all of them; what was wrong with the first that was."""
        found = [job.exception() for job in self._jobs]
        self._jobs.clear()
        return next((error for error in found if isinstance(error, CorruptCheckpointError)), None)


def receive_part(group: Group, tier: MemoryTier, part: Part, source: int, *, drained: bool) -> StoredPart:
    """Receives all files of a part, and makes it this node's own.

    Args:
        group: The ranks that restore together.
        tier: This node's memory.
        part: What comes, with its hashes.
        source: From which rank.
        drained: Whether the durable tier has it already.

    Raises:
        CorruptCheckpointError: A chunk differs from its hash.
        MemoryTierError: No room for it, or its place is taken.
        RestoreError: The source is gone.
    """
    slots: dict[str, Slot] = {}
    failed: Exception | None = None
    try:
        for entry in part.content.files:
            if failed is None:
                try:
                    slots[entry.basename] = tier.acquire(max(1, entry.size))
                except TieredCheckpointError as error:
                    failed = error
            slot = slots.get(entry.basename)
            try:
                if slot is None:
                    receive_file(group, entry, None, source)
                else:
                    with slot.view as whole:
                        receive_file(group, entry, whole, source)
            except CorruptCheckpointError as error:
                failed = failed or error
        if failed is not None:
            raise failed
    except BaseException:
        for slot in slots.values():
            tier.give_back(slot)
        raise
    return commit_received(tier, part, slots, drained=drained)


def commit_received(tier: MemoryTier, part: Part, slots: Mapping[str, Slot], *, drained: bool = False) -> StoredPart:
    """Makes a part that came from another node exist, or frees its slots.

    Raises:
        MemoryTierError: Its place is taken, or there is no room for its description.
    """
    try:
        return tier.commit(part, slots, drained=drained, saved=False)
    except MemoryFullError:
        # The tier has given up the slots as well.
        raise
    except MemoryTierError:
        for slot in slots.values():
            tier.give_back(slot)
        raise
