"""Saving a sharded checkpoint: what its ranks agree on, and what each of them puts into memory.

One rank, the coordinator, issues a :class:`Ticket`, which reaches the others by whatever carries the
plan of the save. Each rank then captures its own file. The coordinator's part, with ``.metadata``,
is committed once every rank has reported that it has captured its own; without it the other parts
are no checkpoint, and nobody takes them for one.

A part is hashed while it is captured, or *behind* its save: the ranks then go on as soon as all
have captured, and each hashes and commits its part while training goes on. A checkpoint counts as
whole, and lets older ones go from memory, once all ranks have said so, which they do when they
begin the next save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.engine.durable.direct_shards import DirectFile
from tiered_checkpoint_io.engine.saving.sealing import Unsealed
from tiered_checkpoint_io.engine.saving.shard_retention import Mine, surplus
from tiered_checkpoint_io.engine.saving.tickets import Ticket
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import MemoryFullError, SaveError, StoreError
from tiered_checkpoint_io.formats.filling import Segment
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.shard_image import Item, Placed, plan_shard
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, Metric


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
        self._unsealed: Unsealed | None = None
        #: By series of names; the oldest first.
        self._completed: dict[str, list[str]] = {}
        #: The save that this process finished behind, and that the other ranks may still be sealing.
        self._finished: Ticket | None = None
        self._agreeing: Ticket | None = None
        #: How what this process seals behind a save ends.
        self.sealing: Future[None] | None = None
        #: Whether this rank's part of the last save is on its way from memory to the durable tier, or was.
        self.is_drained = False

    # -------------------------------------------------------------------------------- every rank
    def begin(self) -> None:
        """Waits until this rank's part of the save before is whole; each rank calls this before the next save.

        Raises:
            SaveError: It failed behind its save. All ranks have to hear of it, and save nothing: nobody
                knows by then that there is a newer checkpoint than those that memory would let go.
        """
        self.give_up()
        self._session.settle()
        # Who issues the next ticket knows then that all ranks have come past here.
        self._agreeing, self._finished = self._finished, None
        sealing, self.sealing = self.sealing, None
        error = sealing.exception(0) if sealing is not None else None
        if error is not None:
            self._session.counts["failed"] += 1
            raise SaveError(
                f"the save before was captured, but did not become whole in memory: {error}",
                operation="save",
                tier="memory",
                hint="this one is not made; the next one is",
            ) from error

    def close(self) -> None:
        """Waits for this rank's part of the last save, and shows its failure.

        Raises:
            SaveError: There is one, and ``on_save_error`` is ``raise``.
        """
        try:
            self.begin()
        except SaveError as error:
            self._session.counts["failed"] -= 1
            last = self._session.last_save
            self._session.failed(last.name if last else "", last.step if last else -1, error)

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

        Raises:
            UsageError: Another live run writes to the same dirpath and namespace.
        """
        session = self._session
        session.check_lease()
        if durable:
            session.claim()
        drain = session.open().drain
        if self._agreeing is not None:
            self.is_complete(self._agreeing.name, self._agreeing.save_id)
            self._agreeing = None
        taken = False
        if durable:
            if self._has_room(drain):
                taken = self._is_taken(name)
                session.known.note(name, exists=True)
            else:
                session.counts["skipped"] += 1
                session.log.warning("Step %d: %s stays in memory: the durable tier is behind", step, name)
                durable = False
        save_id = session.next_id()
        rated = Metric(*metric) if metric is not None else None
        series = self._series(name)
        completed = tuple(self._completed.get(series, ()))
        return Ticket(name, save_id, step, world_size, durable, taken, completed, epoch, rated, series)

    def _has_room(self, drain: DrainHandle) -> bool:
        try:
            drain.start()
            return drain.has_room(self._session.next_id())
        except MemoryFullError as error:
            # Memory has no room for the little that the drain needs; the parts go past both.
            self._session.warn_small(error)
            return True

    def _is_taken(self, name: str) -> bool:
        try:
            return name in self._session.known.all()
        except StoreError as error:
            self._session.log.warning(
                "cannot ask whether %s exists, so the files beside its shards get other names: %s", name, error
            )
            return True

    def finish(
        self,
        save_id: str,
        metadata: bytes,
        *,
        wait: bool,
        extra: tuple[str, bytes] | None = None,
        in_memory: bool = True,
    ) -> None:
        """Makes the checkpoint exist; called by the coordinator once every rank has reported.

        Where it was captured with ``behind``, that is left to :meth:`seal_behind`.

        Args:
            save_id: Which save.
            metadata: The content of ``.metadata``.
            wait: Whether to return only when a durable save is committed there; not with ``behind``.
            extra: The name and content of a small file that goes with it; it gets another name where the
                checkpoint's own is taken.
            in_memory: Whether all other ranks have their parts in memory.

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
        ticket = unsealed.ticket
        small = {METADATA: metadata}
        if extra is not None:
            small[ticket.name_beside(extra[0])] = extra[1]
        if unsealed.is_behind:
            unsealed.small = small
            with self._lock:
                self._unsealed = unsealed
        else:
            self._end(unsealed, small)
        if not in_memory or unsealed.is_direct:
            # Not whole there, it lets no older one go.
            pass
        elif unsealed.is_behind:
            self._finished = ticket
        else:
            self.is_complete(ticket.name, save_id)
        if self.is_drained and wait:
            outcome = self._session.open().drain.wait(save_id, self._session.config.wait_timeout_s)
            if outcome.state != "committed":
                raise SaveError(
                    f"{ticket.name} is in memory, but not on the durable tier: {outcome.error}",
                    operation="save",
                    tier="durable",
                    key=ids.join_url(self._session.dirpath, ticket.name),
                    step=ticket.step,
                )
            self._session.tell_durable(outcome)

    def is_complete(self, name: str, save_id: str) -> None:
        """Takes note that a checkpoint is whole: this process finished it, or a restore has loaded it."""
        keep = max(1, self._session.config.memory_keep_last)
        series = self._series(name)
        self._completed[series] = sorted({*self._completed.get(series, ()), save_id})[-keep:]

    def _series(self, name: str) -> str:
        return "" if self._one_series else ids.series_of(name)

    # ------------------------------------------------------------------------------------- ranks
    def capture(
        self,
        ticket: Ticket,
        rank: int,
        items: Sequence[Item],
        *,
        coordinator: bool,
        threads: int | None = None,
        behind: bool = False,
    ) -> tuple[list[Placed], bool]:
        """Puts this rank's items into memory. When it returns, later changes of them are not in it.

        The part is committed, but for the coordinator's, which :meth:`finish` commits, and for those that
        :meth:`seal_behind` commits. Where memory has no
        room for a durable save, the part goes straight to the durable tier, with one warning.

        Args:
            ticket: From the coordinator.
            rank: This rank, in the group that saves.
            items: What it contributes; it has no file where there is nothing.
            coordinator: Whether it is the coordinator.
            threads: How many threads copy.
            behind: Whether the part is hashed and committed by :meth:`seal_behind`.

        Returns:
            Where each item lies in ``ticket.file_name(rank)``; and whether that is in memory.

        Raises:
            MemoryFullError: No room, even after older checkpoints made some; and the save is of memory alone.
        """
        started = time.monotonic()
        self.give_up()
        tier, saver, drain = self._session.open()
        mine = Mine(rank, ids.run_id_of(ticket.save_id))
        held = [stored for stored in tier.parts() if mine(stored)]
        for stored in surplus(held, ticket, self._session.config.memory_keep_last):
            tier.remove(stored)
        image, placed = plan_shard(items)
        unsealed = Unsealed(ticket, rank, None, None, None, started, threads, behind)
        if placed:
            image = unsealed.image = image if image.size else _one_byte()
            try:
                if ticket.durable:
                    drain.start()
                unsealed.slot, hashes = saver.capture(
                    image, protect=ticket.completed[-1:], mine=mine, threads=threads, hashed=not behind
                )
                unsealed.hashes = None if behind else hashes
            except MemoryFullError as error:
                if not ticket.durable:
                    raise
                self._session.warn_small(error)
                unsealed.direct = DirectFile(image, threads=threads)
                unsealed.hashes = unsealed.direct.hashes
        if not coordinator:
            unsealed.small = {}
        if coordinator or unsealed.is_behind:
            with self._lock:
                self._unsealed = unsealed
        else:
            self._end(unsealed, {})
        return placed, not unsealed.is_direct

    def seal_behind(self) -> None:
        """Hashes and commits behind the caller's back what was captured so: see :attr:`sealing`.

        To be called when the save has succeeded on all ranks, and not before: what they still have to
        tell each other would wait for the processor.
        """
        with self._lock:
            unsealed = self._unsealed
            if unsealed is None or unsealed.small is None or not unsealed.is_behind:
                return
            self._unsealed = None
        self._end(unsealed, unsealed.small)

    def give_up(self) -> None:
        """Frees what a save left that did not finish: some other rank failed, and DCP has told all."""
        with self._lock:
            unsealed, self._unsealed = self._unsealed, None
        if unsealed is not None:
            self._session.log.error(
                "Step %d: %s was not finished: another rank failed", unsealed.ticket.step, unsealed.ticket.name
            )
            self._session.counts["failed"] += 1
            unsealed.give_back(self._session)

    # ------------------------------------------------------------------------------------ inside
    def _end(self, unsealed: Unsealed, small: dict[str, bytes]) -> None:
        """Seals a part, here and now or behind the caller's back."""
        ticket = unsealed.ticket
        size = (unsealed.image.size if unsealed.image is not None else 0) + sum(map(len, small.values()))
        if not unsealed.is_behind:
            unsealed.seal(self._session, small)
        self.is_drained = ticket.durable and not unsealed.is_direct
        tiers = frozenset(({"durable"} if ticket.durable else set()) | (set() if unsealed.is_direct else {"memory"}))
        stall = time.monotonic() - unsealed.started
        # Whoever waits for the durable tier does so behind this; what went past memory is there, or seals behind it.
        queued = ticket.durable and (unsealed.is_behind or not unsealed.is_direct)
        report = SaveReport(ticket.name, ticket.step, ticket.save_id, size, stall, tiers, queued)
        self._session.last_save = report
        if unsealed.is_behind:
            self.sealing = self._session.run_behind(ticket.name, lambda: unsealed.seal(self._session, small))
        self._session.counts["saved"] += 1
        self._session.log.at_step(ticket.step).info(report.line(self._session.dirpath))


def _one_byte() -> Image:
    """The file of items that have no bytes: an empty one could not be mapped."""
    return Image(1, (Segment(0, memoryview(b"\0")),), (), planned=True)
