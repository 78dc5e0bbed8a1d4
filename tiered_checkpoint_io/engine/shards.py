"""Saving a sharded checkpoint: what its ranks agree on, and what each of them puts into memory.

One rank, the coordinator, issues a :class:`Ticket`, which reaches the others by whatever carries the
plan of the save. Each rank then captures its own file. The coordinator's part, with ``.metadata``,
is committed last, once every rank has reported success; without it the other parts are no
checkpoint, and nobody takes them for one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.engine.saver import versions
from tiered_checkpoint_io.engine.session import SaveReport, Session
from tiered_checkpoint_io.engine.shard_retention import Mine, surplus
from tiered_checkpoint_io.engine.tickets import Ticket
from tiered_checkpoint_io.errors import MemoryFullError, SaveError, StoreError
from tiered_checkpoint_io.filling import Segment
from tiered_checkpoint_io.image import Image
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.manifest import (
    METADATA,
    Content,
    FileEntry,
    Metric,
    Part,
    chunk_ranges,
    chunk_size_for,
    hash_bytes,
)
from tiered_checkpoint_io.shard_image import Item, Placed, plan_shard
from tiered_checkpoint_io.storage.slots import Slot


@dataclass(slots=True)
class _Unsealed:
    """The coordinator's part, until the other ranks have reported."""

    ticket: Ticket
    part: Part
    slots: dict[str, Slot]
    started: float


class ShardSaver:
    """Saves one process' parts of sharded checkpoints."""

    def __init__(self, session: Session, *, one_series: bool = False) -> None:
        """Takes the tiers.

        Args:
            session: Both tiers.
            one_series: Whether all names are one job's, however they are made; by default process
                groups that save side by side keep their own, by the form of their names.
        """
        self._session = session
        self._one_series = one_series
        self._lock = threading.Lock()
        self._unsealed: _Unsealed | None = None
        #: By series of names; the oldest first.
        self._completed: dict[str, list[str]] = {}

    # ------------------------------------------------------------------------------- coordinator
    def issue(
        self,
        name: str,
        *,
        step: int,
        world_size: int,
        durable: bool,
        epoch: int = -1,
        metric: tuple[str, float] | None = None,
    ) -> Ticket:
        """Decides what the ranks of a save have to agree on; called by the coordinator alone.

        Waits for room on the way to the durable tier, as the configuration says.

        Args:
            name: The checkpoint's name.
            step: The training step.
            world_size: How many ranks contribute.
            durable: Whether it is to go to the durable tier, where there is room.
            epoch: The epoch.
            metric: What a ModelCheckpoint monitored, and its value.
        """
        session = self._session
        drain = session.open().drain
        taken = False
        if durable:
            drain.start()
            if drain.has_room(session.next_id()):
                taken = self._is_taken(name)
                session.note(name, exists=True)
            else:
                session.counts["skipped"] += 1
                session.log.warning("Step %d: %s stays in memory: the durable tier is behind", step, name)
                durable = False
        save_id = session.next_id()
        rated = Metric(*metric) if metric is not None else None
        series = self._series(name)
        completed = tuple(self._completed.get(series, ()))
        return Ticket(name, save_id, step, world_size, durable, taken, completed, epoch, rated, series)

    def _is_taken(self, name: str) -> bool:
        try:
            return self._session.knows(name)
        except StoreError as error:
            self._session.log.warning(
                "cannot ask whether %s exists, so the files beside its shards get other names: %s", name, error
            )
            return True

    def finish(
        self, save_id: str, metadata: bytes, *, wait: bool, extra: tuple[str, bytes] | None = None
    ) -> SaveReport:
        """Makes the checkpoint exist; called by the coordinator once every rank has reported.

        Args:
            save_id: Which save.
            metadata: The content of ``.metadata``.
            wait: Whether to return only when a durable save is committed there.
            extra: The name and content of a small file that goes with it; it gets another name where the
                checkpoint's own is taken.

        Raises:
            SaveError: The save was given up, or did not reach the durable tier while we waited.
            MemoryFullError: No space for ``metadata``.
        """
        with self._lock:
            unsealed, self._unsealed = self._unsealed, None
        if unsealed is None or unsealed.ticket.save_id != save_id:
            raise SaveError(
                "a later save began before this one was finished",
                operation="finish",
                key=save_id,
                hint="wait for one save to end before the next",
            )
        ticket, part = unsealed.ticket, unsealed.part
        small = {METADATA: metadata}
        if extra is not None:
            small[ticket.name_beside(extra[0])] = extra[1]
        entries = [_small_entry(f"{ticket.name}/{basename}", data) for basename, data in small.items()]
        part = replace(part, content=replace(part.content, files=(*part.content.files, *entries)))
        self._commit(unsealed, part, small)
        self.is_complete(ticket.name, save_id)
        if ticket.durable:
            # It may have left while it had nothing to do.
            self._session.open().drain.start()
        if ticket.durable and wait:
            outcome = self._session.open().drain.wait(save_id, self._session.config.wait_timeout_s)
            if outcome.state != "committed":
                raise SaveError(
                    f"{ticket.name} is in memory, but not on the durable tier: {outcome.error}",
                    operation="save",
                    tier="durable",
                    key=ids.join_url(self._session.dirpath, ticket.name),
                    step=ticket.step,
                )
        return self._report(ticket, part, unsealed.started)

    def is_complete(self, name: str, save_id: str) -> None:
        """Takes note that a checkpoint is whole: this process finished it, or a restore has loaded it."""
        keep = max(1, self._session.config.memory_keep_last)
        series = self._series(name)
        self._completed[series] = sorted({*self._completed.get(series, ()), save_id})[-keep:]

    def _series(self, name: str) -> str:
        return "" if self._one_series else ids.series_of(name)

    # ------------------------------------------------------------------------------------- ranks
    def capture(
        self, ticket: Ticket, rank: int, items: Sequence[Item], *, coordinator: bool, threads: int | None = None
    ) -> list[Placed]:
        """Puts this rank's items into memory. When it returns, later changes of them are not in it.

        The part is committed, but for the coordinator's, which :meth:`finish` commits.

        Args:
            ticket: From the coordinator.
            rank: This rank, in the group that saves.
            items: What it contributes; it has no file where there is nothing.
            coordinator: Whether it is the coordinator.
            threads: How many threads copy.

        Returns:
            Where each item lies in ``ticket.file_name(rank)``.

        Raises:
            MemoryFullError: No room, even after older checkpoints made some.
        """
        started = time.monotonic()
        self.give_up()
        tier, saver, drain = self._session.open()
        mine = Mine(rank, ids.run_id_of(ticket.save_id))
        held = [stored for stored in tier.parts() if mine(stored)]
        for stored in surplus(held, ticket, self._session.config.memory_keep_last):
            tier.remove(stored)
        image, placed = plan_shard(items)
        slots: dict[str, Slot] = {}
        files: tuple[FileEntry, ...] = ()
        if placed:
            image = image if image.size else _one_byte()
            slot, hashes = saver.capture(image, protect=ticket.completed[-1:], mine=mine, threads=threads)
            name = ticket.file_name(rank)
            slots[name] = slot
            files = (FileEntry(f"{ticket.name}/{name}", image.size, image.chunk_size, hashes),)
        content = Content(
            save_id=ticket.save_id,
            step=ticket.step,
            epoch=ticket.epoch,
            kind="sharded",
            created=time.time(),
            world_size=ticket.world_size,
            writer=versions(),
            files=files,
            metric=ticket.metric,
        )
        part = Part(ticket.name, rank, content, self._session.dirpath, ticket.durable)
        unsealed = _Unsealed(ticket, part, slots, started)
        if coordinator:
            with self._lock:
                self._unsealed = unsealed
        else:
            self._commit(unsealed, part, {})
            if ticket.durable:
                drain.start()
            self._report(ticket, part, started)
        if slots:
            saver.prepare(image.size)
        return placed

    def give_up(self) -> None:
        """Frees what a save left that did not finish: some other rank failed, and DCP has told all."""
        with self._lock:
            unsealed, self._unsealed = self._unsealed, None
        if unsealed is not None:
            self._session.log.error(
                "Step %d: %s was not finished: another rank failed", unsealed.ticket.step, unsealed.ticket.name
            )
            self._session.counts["failed"] += 1
            self._give_back(unsealed)

    # ------------------------------------------------------------------------------------ inside
    def _commit(self, unsealed: _Unsealed, part: Part, small: dict[str, bytes]) -> None:
        try:
            self._session.open().tier.commit(part, {**unsealed.slots, **small})
        except MemoryFullError:
            # The tier has given up the slots as well.
            raise
        except BaseException:
            self._give_back(unsealed)
            raise

    def _give_back(self, unsealed: _Unsealed) -> None:
        for slot in unsealed.slots.values():
            self._session.open().tier.give_back(slot)

    def _report(self, ticket: Ticket, part: Part, started: float) -> SaveReport:
        stall, size = time.monotonic() - started, part.content.size
        tiers = frozenset({"memory", "durable"} if ticket.durable else {"memory"})
        report = SaveReport(ticket.name, ticket.step, ticket.save_id, size, stall, tiers)
        self._session.counts["saved"] += 1
        self._session.last_save = report
        self._session.log.info(
            "Step %d: saved %s to %s: %s", ticket.step, ticket.name, "+".join(sorted(tiers)), rate(size, stall)
        )
        return report


def _one_byte() -> Image:
    """The file of items that have no bytes: an empty one could not be mapped."""
    return Image(1, (Segment(0, memoryview(b"\0")),), (), planned=True)


def _small_entry(path: str, data: bytes) -> FileEntry:
    view, chunk_size = memoryview(data), chunk_size_for(len(data))
    hashes = tuple(hash_bytes(view[offset : offset + length]) for offset, length in chunk_ranges(len(data), chunk_size))
    return FileEntry(path, len(data), chunk_size, hashes)
