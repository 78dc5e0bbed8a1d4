"""Chunks and parts from one rank's memory to another's, whatever carries the bytes.

This is how replicas travel, over a link of two ranks; for how all ranks of a restore send at once see :mod:`rounds`.
Before a part, its receiver says whether it can take it. Before each chunk, its sender says whether it can send it.
After the last one, the receiver says whether the part has arrived. A rank that fails says so there, whatever
the reason, and both ranks end this transfer and begin the next. Each chunk is verified where it arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from tiered_checkpoint_io.engine.chunks import verify
from tiered_checkpoint_io.engine.ranks.store_client import PeerError
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, TieredCheckpointError
from tiered_checkpoint_io.memory.parts import StoredPart, reading
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.space import MemoryFullError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.documents import MAX_SIZE
from tiered_checkpoint_io.model.manifest import FileEntry, Part

_T_co = TypeVar("_T_co", covariant=True)
_T = TypeVar("_T")

_HASH_THREADS = 2
#: Bytes of a status on the wire; of blanks alone where all is well.
STATUS_SIZE = 1024


# --------------------------------------------------------------------------------------- channels
class Channel(Protocol):
    """The bytes between this rank and another one.

    Attributes:
        name: The other rank, for errors.
    """

    name: str

    def send(self, data: memoryview) -> None:
        """Sends bytes, straight from where they lie."""
        ...

    def receive(self, data: memoryview) -> None:
        """Fills ``data``."""
        ...


def status_of(problem: str) -> memoryview:
    """What is wrong, as it travels; nothing is where the text is empty."""
    return memoryview(bytearray(problem.encode()[:STATUS_SIZE].ljust(STATUS_SIZE)))


def text_in(status: memoryview) -> str:
    """The text that :func:`status_of` was given."""
    return bytes(status).decode(errors="replace").strip()


def send_status(channel: Channel, problem: str = "") -> None:
    """Says what is wrong here; nothing where the text is empty."""
    channel.send(status_of(problem))


def receive_status(channel: Channel) -> str:
    """What the other side has to :func:`send_status`."""
    status = memoryview(bytearray(STATUS_SIZE))
    channel.receive(status)
    return text_in(status)


def text_of(error: Exception) -> str:
    """An error as the other side is to read it."""
    return str(error) if isinstance(error, TieredCheckpointError) else f"{type(error).__name__}: {error}"


# ----------------------------------------------------------------------------------------- chunks
def send_chunk(channel: Channel, read: Callable[[], memoryview]) -> str:
    """Sends a chunk, or in its place why it can't be read, which is the answer."""
    chunk, problem = memoryview(b""), ""
    try:
        chunk = read()
    except Exception as error:
        problem = text_of(error)
    send_status(channel, problem)
    if not problem:
        channel.send(chunk)
    return problem


def receive_chunk(channel: Channel, entry: FileEntry, chunk: memoryview) -> None:
    """Receives a chunk, which is still to be verified.

    Raises:
        CorruptCheckpointError: The other side can't send it.
    """
    problem = receive_status(channel)
    if problem:
        raise CorruptCheckpointError(
            f"{channel.name} could not send it: {problem}", operation="restore", key=entry.path
        )
    channel.receive(chunk)


# ------------------------------------------------------------------------------------------ parts
def send_description(channel: Channel, part: Part) -> None:
    """Says what is to be sent next; in its place, :func:`send_status` says why nothing is."""
    described = part.to_json()
    send_status(channel)
    send_status(channel, str(len(described)))
    channel.send(memoryview(bytearray(described)))


def receive_description(channel: Channel) -> Part:
    """What the other side has to :func:`send_description`.

    Raises:
        PeerError: It sends nothing, or what can't be a description.
        CorruptCheckpointError: It is not understood here.
    """
    problem = receive_status(channel)
    if problem:
        raise PeerError(problem, operation="load", key=channel.name)
    size = receive_status(channel)
    if not size.isdecimal() or int(size) > MAX_SIZE:
        raise PeerError(f"a description of {size!r} bytes was announced", operation="load", key=channel.name)
    described = bytearray(int(size))
    channel.receive(memoryview(described))
    return Part.from_json(bytes(described), where=channel.name)


def find_part(tier: MemoryTier, save_id: str, rank: int | None = None) -> StoredPart:
    """A part in this node's memory: its own, or a replica that it keeps; of any rank where that is None.

    Raises:
        CheckpointNotFoundError: There is none, or no longer.
    """
    for stored in tier.held():
        if stored.save_id == save_id and rank in (None, stored.part.rank):
            return stored
    raise CheckpointNotFoundError("no longer in memory", operation="restore", tier="memory", key=save_id)


def send_held_part(channel: Channel, tier: MemoryTier, part: Part, is_late: Callable[[], bool] | None = None) -> str:
    """Sends all files of a part that this node's memory holds, to :func:`receive_part`.

    Where bytes were not received as they should be, and are damaged here, the part is quarantined.

    Returns:
        What went wrong, on either side.

    Raises:
        PeerError: ``is_late`` says that all of it ought to have been sent by now.
    """
    answer = receive_status(channel)
    if answer:
        return answer
    stored: StoredPart | None = None
    with contextlib.ExitStack() as held:
        views: Mapping[str, memoryview] = {}

        def read(entry: FileEntry, offset: int, length: int) -> memoryview:
            nonlocal stored, views
            if stored is None:
                stored = find_part(tier, part.save_id, part.rank)
                views = held.enter_context(reading(stored))
            return views[entry.basename][offset : offset + length]

        problem = ""
        for entry, _, (offset, length) in _chunks(part):
            problem = send_chunk(channel, partial(read, entry, offset, length))
            if problem:
                break
            if is_late is not None and is_late():
                raise PeerError("not sent in time", operation="replicate", key=channel.name, step=part.content.step)
        problem = problem or receive_status(channel)
    if problem and stored is not None:
        quarantine_damaged(tier, stored)
    return problem


def quarantine_damaged(tier: MemoryTier, stored: StoredPart) -> None:
    """Verifies a part of which bytes did not arrive as they should be, and quarantines it where it is damaged here."""
    with contextlib.suppress(CheckpointNotFoundError, OSError):
        try:
            with reading(stored) as views:
                for entry in stored.part.content.files:
                    verify(entry, views[entry.basename], where=str(stored.file(entry.basename)))
        except CorruptCheckpointError as error:
            tier.quarantine(stored.folder, str(error))


class Destination(Protocol[_T_co]):
    """Where a part that arrives is put."""

    def open(self) -> contextlib.AbstractContextManager[Mapping[str, memoryview]]:
        """Room for its files, by basename."""
        ...

    def keep(self) -> _T_co:
        """Makes it exist, once all has arrived and :meth:`open`'s block has ended."""
        ...

    def drop(self) -> None:
        """Frees the room."""
        ...


class SlotDestination:
    """Slots of a memory tier, in which a part becomes this node's."""

    def __init__(
        self, tier: MemoryTier, part: Part, *, drained: bool = False, acquire: Callable[[int], Slot] | None = None
    ) -> None:
        """Takes no room yet.

        Args:
            tier: This node's memory, or its replicas.
            part: What arrives.
            drained: Whether this node has nothing to do for it to get to the durable tier.
            acquire: Gives a slot of a size; by default, as the tier does.
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
        """A descriptor of a file, where none of its pages was touched yet."""
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


def receive_part(channel: Channel, part: Part, destination: Destination[_T]) -> _T:
    """Receives all files of a part, and verifies them.

    Raises:
        CorruptCheckpointError: A chunk differs from its hash, or the other side could not read it.
        MemoryTierError: There is no room for it, or its place is taken.
    """
    try:
        _receive_files(channel, part, destination)
        with _reporting(channel):
            kept = destination.keep()
    except BaseException:
        destination.drop()
        raise
    send_status(channel)
    return kept


def _receive_files(channel: Channel, part: Part, destination: Destination[object]) -> None:
    with contextlib.ExitStack() as held:
        with _reporting(channel):
            views = held.enter_context(destination.open())
        send_status(channel)
        pool = held.enter_context(ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="tiered-check"))
        checks: list[Future[None]] = []
        damage: BaseException | None = None
        for entry, index, (offset, length) in _chunks(part):
            chunk = views[entry.basename][offset : offset + length]
            receive_chunk(channel, entry, chunk)
            try:
                checks.append(pool.submit(entry.check_chunk, index, chunk, tier="peer", where=channel.name))
            except Exception as error:
                # The other side has to get rid of the rest all the same, and waits for the outcome.
                damage = damage or error
        with _reporting(channel):
            damage = damage or next(filter(None, (check.exception() for check in checks)), None)
            if damage is not None:
                raise damage


@contextlib.contextmanager
def _reporting(channel: Channel) -> Iterator[None]:
    """Tells the other side, which waits for a status, what fails in the block."""
    try:
        yield
    except Exception as error:
        send_status(channel, text_of(error))
        raise


def _chunks(part: Part) -> list[tuple[FileEntry, int, tuple[int, int]]]:
    """Each chunk of a part's files that has bytes, in the order in which they travel."""
    return [
        (entry, index, (offset, length))
        for entry in part.content.files
        for index, (offset, length) in enumerate(entry.chunks)
        if length
    ]
