"""A part for which memory has no room: sent straight to the durable tier by this process, the commit included."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.durable.arrivals import Arrivals
from tiered_checkpoint_io.engine.durable.commit import commit, put_part
from tiered_checkpoint_io.engine.durable.garbage import clear_up
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import DrainError, SaveError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.node import refuse_beyond_memory
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores.base import Store

#: Tells, while the block runs, whether some part of the save will not come.
Watching = Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]]


def nothing_missing() -> contextlib.AbstractContextManager[Callable[[], bool]]:
    """A :data:`Watching` where ranks can't say that a part will not come."""
    return contextlib.nullcontext(lambda: False)


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
        """The bytes of the file, whose memory is free after the block."""
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


def send(
    session: Session,
    part: Part,
    file: DirectFile | DirectSlot | None,
    small: Mapping[str, bytes],
    watching: Watching,
) -> None:
    """Takes a part to the durable tier. The coordinator's waits for the parts of all other ranks, and commits.

    Args:
        session: Both tiers.
        part: The part.
        file: Its file, whose memory is free once it is there; None where it has small ones alone.
        small: The others, by basename.
        watching: Asked while the parts of other ranks are waited for.

    Raises:
        SaveError: The other parts have not come within ``wait_timeout_s``, or a later save has taken the name.
        DrainError: The drain has not finished earlier saves of the name.
        StoreError, TieredCheckpointError: The durable tier refused it.
    """
    end = session.clock.monotonic() + session.config.wait_timeout_s
    with file.reading() if file is not None else contextlib.nullcontext() as data:
        if data is not None and [entry.basename for entry in part.content.files] == [part.content.switch]:
            # Its only file is the one that changes over.
            session.open().drain.make_way(part.name, session.config.wait_timeout_s)
            commit(session.durable(), part, {part.content.files[0].basename: data})
            _note_outcome(session, part)
            return
        files = {name: memoryview(content) for name, content in small.items()}
        large = [entry.basename for entry in part.content.files if entry.basename not in files]
        store, journal = session.durable(), _Journal()
        fate = put_part(store, part, files | {name: data for name in large if data is not None}, journal=journal)
    if fate == "replaced":
        raise _refused(part, "a later save has taken its name", "give each save a name of its own")
    if not part.commits or fate != "sent":
        return
    with watching() as is_hopeless:
        arrivals = _await_parts(store, part, session.clock, _left_s(session.clock, end), is_hopeless)
    _finish_earlier_saves(session, part, end)
    commit(store, part, files, arrivals.rows, journal=journal)
    _note_outcome(session, part)
    # What waits on this node may still become complete.
    busy = {stored.part.name for stored in session.open().tier.parts() if stored.pending}
    patience_s = float(session.config.wait_timeout_s)
    clear_up(store, part, patience_s=patience_s, busy=busy, log=session.log)


class _Journal:
    """What an upload notes of itself; no other process resumes this one, for what it uploads dies with the process."""

    def __init__(self) -> None:
        self._state: dict[str, object] | None = None

    def read(self) -> dict[str, object] | None:
        return self._state

    def write(self, state: dict[str, object]) -> None:
        self._state = state

    def clear(self) -> None:
        self._state = None


def _await_parts(store: Store, part: Part, clock: Clock, timeout_s: float, is_hopeless: Callable[[], bool]) -> Arrivals:
    """Waits for the parts of all other ranks; returns them."""
    end, interval = clock.monotonic() + timeout_s, clock.timing.first_look_for_parts_s
    arrivals = Arrivals(part)
    while True:
        # Asked first: what arrived before another rank gave up is not lost.
        gives_up = is_hopeless()
        arrivals.look(store)
        missing = arrivals.missing
        if not missing:
            return arrivals
        if gives_up or clock.monotonic() >= end:
            named = ", ".join(map(str, missing[:16]))
            why = "are not there, and some were given up" if gives_up else f"have not come within {timeout_s:.0f} s"
            raise _refused(
                part,
                f"the parts of {len(missing)} of {part.content.parts} ranks {why}: {named}",
                "see the logs of those ranks and of the drains of their nodes",
            )
        clock.sleep(interval)
        interval = min(clock.timing.last_look_for_parts_s, 2 * interval)


def _finish_earlier_saves(session: Session, part: Part, end: float) -> None:
    """Waits until the drain has finished earlier saves of this name: two that commit at once might mix.

    One that has failed is given up: all parts of this one are there.

    Raises:
        DrainError: The drain has not finished them by ``end``.
    """
    (tier, _, drain), clock = session.open(), session.clock
    for stored in tier.parts():
        same = (stored.part.name, stored.part.dirpath) == (part.name, part.dirpath)
        if not (stored.pending and same and stored.part.commits and stored.save_id < part.save_id):
            continue
        if drain.wait(stored.op_id, _left_s(clock, end)).state == "failed":
            drain.submit(Request(session.next_id(), "cancel", "cancel", part.dirpath, stored.save_id))
            while stored.op_id in drain.pending():
                if clock.monotonic() > end:
                    raise DrainError(
                        "an earlier save of this name could not be given up",
                        operation="save",
                        tier="durable",
                        key=ids.join_url(part.dirpath, part.name),
                        step=part.content.step,
                        hint="see status/drain.log below memory_dir",
                    )
                drain.ensure()
                clock.sleep(clock.timing.cancel_poll_s)
    drain.make_way(part.name, _left_s(clock, end))


def _note_outcome(session: Session, part: Part) -> None:
    try:
        queue = session.open().drain.queue
        queue.note_past(part.save_id, part.name, part.content.step, part.content.size, part.dirpath)
    except OSError as error:
        session.log.warning("deletes that wait for a durable save may wait for the next: %s", error)


def _left_s(clock: Clock, end: float) -> float:
    """Seconds until ``end``: one at least, for what would be done at once."""
    return max(1.0, end - clock.monotonic())


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
