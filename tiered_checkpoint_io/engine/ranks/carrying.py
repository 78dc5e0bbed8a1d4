"""Whole files from one rank's memory to another's, in a restore: on the main thread, with all ranks there.

Every rank knows from the plan what it sends and receives, and in which order. A word goes before the files, from
who receives them, and one before each chunk, from who sends it: so a rank that can't go on, whatever the reason,
says so, and both come to the end of this transfer and to the next. Each chunk is verified where it arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MemoryFullError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model.manifest import FileEntry, Part

_HASH_THREADS = 2
#: Bytes of a word on the wire; of blanks alone where all is well.
_WORD = 512


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


def tell(group: Group, problem: str, rank: int) -> None:
    """Tells a rank, which hears it, what is wrong here; nothing where the text is empty."""
    group.send(memoryview(bytearray(problem.encode()[:_WORD].ljust(_WORD))), rank)


def hear(group: Group, rank: int) -> str:
    """What a rank has to :func:`tell`."""
    word = bytearray(_WORD)
    group.receive(word, rank)
    return word.decode(errors="replace").strip()


def text_of(error: Exception) -> str:
    """An error as the other side is to read it."""
    return str(error) if isinstance(error, TieredCheckpointError) else f"{type(error).__name__}: {error}"


def send_part(group: Group, tier: MemoryTier, part: Part, target: int) -> Exception | None:
    """Sends all files of a part that this node holds; gives what was wrong with them here.

    What is damaged is quarantined, and travels all the same: the other side finds it out as well.

    Raises:
        LostRankError: The target is gone.
    """
    views: Mapping[str, memoryview] = {}
    problem: Exception | None = None
    stored: StoredPart | None = None
    with contextlib.ExitStack() as held:
        checks = held.enter_context(contextlib.closing(_Checks()))
        try:
            stored = find_part(tier, part.save_id, part.rank)
            views = held.enter_context(tier.reading(stored))
        except Exception as error:
            # Whatever it is, the other side waits for a word.
            problem = error
        if hear(group, target):
            return problem
        for entry, index, (offset, length) in _chunks(part):
            chunk = memoryview(b"")
            if problem is None:
                try:
                    chunk = views[entry.basename][offset : offset + length]
                    checks.add(entry, index, chunk, tier="memory", where=str(stored and stored.file(entry.basename)))
                except Exception as error:
                    problem = error
            tell(group, text_of(problem) if problem is not None else "", target)
            if problem is not None:
                break
            group.send(chunk, target)
        problem = problem or checks.problem()
    if isinstance(problem, CorruptCheckpointError) and stored is not None:
        with contextlib.suppress(OSError):
            tier.quarantine(stored.folder, str(problem))
    return problem


def receive_files(
    group: Group, part: Part, views: Mapping[str, memoryview], source: int, problem: Exception | None = None
) -> None:
    """Receives all files of a part, by basename.

    Args:
        group: The ranks that restore together.
        part: What comes, with its hashes.
        views: Where to put it.
        source: From which rank, which is sending it.
        problem: Why there is no place to put it, where there is none: the source is told so, and it is raised.

    Raises:
        CorruptCheckpointError: A chunk differs from its hash, or the source could not read it.
        LostRankError: The source is gone.
    """
    tell(group, text_of(problem) if problem is not None else "", source)
    with contextlib.closing(_Checks()) as checks:
        for entry, index, (offset, length) in _chunks(part) if problem is None else ():
            refused = hear(group, source)
            if refused:
                raise not_sent(refused, entry, source)
            chunk = views[entry.basename][offset : offset + length]
            group.receive(chunk, source)
            try:
                checks.add(entry, index, chunk, tier="peer", where=f"rank {source}")
            except Exception as error:
                # The source has to get rid of the rest all the same.
                problem = problem or error
        problem = problem or checks.problem()
    if problem is not None:
        raise problem


def not_sent(why: str, entry: FileEntry, source: int) -> CorruptCheckpointError:
    """The error of a rank that was told that another one can't send what it is to send."""
    return CorruptCheckpointError(f"rank {source} could not send it: {why}", operation="restore", key=entry.path)


def _chunks(part: Part) -> list[tuple[FileEntry, int, tuple[int, int]]]:
    """Each chunk of a part's files that has bytes, in the order in which they travel."""
    return [
        (entry, index, (offset, length))
        for entry in part.content.files
        for index, (offset, length) in enumerate(entry.chunks)
        if length
    ]


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

    def problem(self) -> Exception | None:
        """Waits for all of them; what was wrong with the first that was."""
        found = [job.exception() for job in self._jobs]
        self._jobs.clear()
        return next((error for error in found if isinstance(error, Exception)), None)


def receive_part(group: Group, tier: MemoryTier, part: Part, source: int, *, drained: bool) -> StoredPart:
    """Receives all files of a part, and makes it this node's own.

    Args:
        group: The ranks that restore together.
        tier: This node's memory.
        part: What comes, with its hashes.
        source: From which rank.
        drained: Whether the durable tier has it already.

    Raises:
        CorruptCheckpointError: A chunk differs from its hash, or the source could not read it.
        MemoryTierError: No room for it, or its place is taken.
        LostRankError: The source is gone.
    """
    slots: dict[str, Slot] = {}
    try:
        problem: Exception | None = None
        with contextlib.ExitStack() as held:
            views: dict[str, memoryview] = {}
            try:
                for entry in part.content.files:
                    slot = slots[entry.basename] = tier.acquire(max(1, entry.size))
                    views[entry.basename] = held.enter_context(slot.view)
            except Exception as error:
                problem = error
            receive_files(group, part, views, source, problem)
    except BaseException:
        for slot in slots.values():
            tier.give_back(slot)
        raise
    return commit_received(tier, part, slots, drained=drained)


def commit_received(tier: MemoryTier, part: Part, slots: Mapping[str, Slot], *, drained: bool = False) -> StoredPart:
    """Makes a part that came from another node exist, or frees its slots.

    Raises:
        MemoryTierError: Its place is taken, or there is no room for its description.
        OSError: The file system refused otherwise.
    """
    try:
        return tier.commit(part, slots, drained=drained, saved=False)
    except MemoryFullError:
        # The tier has given up the slots as well.
        raise
    except BaseException:
        for slot in slots.values():
            tier.give_back(slot)
        raise
