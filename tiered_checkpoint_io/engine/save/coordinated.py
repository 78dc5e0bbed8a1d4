"""Saving a checkpoint whose ranks agree: one coordinates, and each puts its part into memory.

The coordinator issues the :class:`SaveFacts`, which reach the other ranks together with the plan of the save. Each rank
then captures its own file. The coordinator's part, with ``.metadata``, is sealed once every rank has reported that it
has captured its own; without that part, the others make no checkpoint.

A part is sealed with its save, or in the background: the ranks then continue as soon as all have captured. A checkpoint
counts as complete, so that older ones may be removed from memory, once all ranks have come to the next save without a
failure.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NoReturn

from tiered_checkpoint_io.engine.save.facts import OF_PARTS, SaveFacts, admit, arrived_votes, may_be_taken, skip
from tiered_checkpoint_io.engine.save.saver import PartSave, Saver
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.image import Image, Segment
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA

#: Number of remembered saves that are of no use to memory: a part on its way to the durable tier stays until then.
_LACKING = 64


class CoordinatedSaver(Saver):
    """Saves one process' parts of checkpoints that several ranks save together."""

    def __init__(self, session: Session, *, one_series: bool = False) -> None:
        """Takes the tiers; with ``one_series``, all names are one job's.

        By default, process groups that save side by side keep their own, by the form of their names.
        """
        super().__init__(session, OF_PARTS)
        self._one_series = one_series
        self._lock = threading.Lock()
        #: A part that is captured, but not sealed.
        self._captured: PartSave | None = None
        #: Completed saves, by series of names; the oldest first.
        self._completed: dict[str, list[str]] = {}
        #: On the coordinator, the last issued save, while memory may never hold all of it; and earlier ones like it.
        self._incomplete: str | None = None
        self._lacking: deque[str] = deque(maxlen=_LACKING)
        #: The save that this process finished in the background, and that other ranks may still be sealing.
        self._finished: SaveFacts | None = None
        self._agreeing: SaveFacts | None = None
        #: The background task of the last save, if it has one: its result is the :attr:`op_id` of the sealed part.
        self.sealing: Future[str | None] | None = None
        #: The drain's operation that uploads this rank's part of the last save, if any.
        self.op_id: str | None = None

    # -------------------------------------------------------------------------------- every rank
    def begin(self) -> None:
        """Waits until this rank's part of the last save is sealed; each rank calls this before the next save.

        If sealing failed in the background, this raises SaveError. All ranks have to learn of this, and must not save:
        memory would remove older checkpoints for a newer one that is not complete.
        """
        failed = self._end_last()
        if failed is not None:
            self._session.count_failure(*failed)
            raise failed[2]

    def fail(self, error: Exception) -> NoReturn:
        """Raises the error of :meth:`begin`; by this error, other ranks may learn that the last save failed."""
        # This rank does not learn if all ranks have sealed the earlier save.
        self._finished = None
        raise error

    def close(self) -> None:
        """Waits for this rank's part of the last save; raises its failure if ``on_save_error`` is ``raise``."""
        failed = self._end_last()
        if failed is not None:
            self._session.failed(*failed)

    # ------------------------------------------------------------------------------- coordinator
    def issue(self, wanted: SaveFacts) -> SaveFacts:
        """Completes the facts on which the ranks of a save agree; only the coordinator calls this.

        Waits for room in the queue. ``wanted`` has no save id, and nothing about other saves. ConfigError if another
        live run writes to the same dirpath.
        """
        session, name, step, durable = self._session, wanted.name, wanted.step, wanted.durable
        session.claims.check()
        if durable:
            session.claims.claim()
        session.open()
        self.may_overlap()
        if self._agreeing is not None:
            self.is_complete(self._agreeing.name, self._agreeing.save_id, self._agreeing.step)
            self._agreeing = None
        if self._incomplete is not None:
            # Some rank has failed, or its node has no room: the other ranks' parts of it are of no use.
            self._lacking.append(self._incomplete)
        series = self._series(name, step)
        facts = replace(
            wanted,
            save_id=session.save_ids.next(),
            taken=may_be_taken(session, name, step, durable=durable),
            completed=tuple(self._completed.get(series, ())),
            series=series,
            lacking=tuple(self._lacking),
        )
        self._incomplete = facts.save_id
        return admit(session, facts, votes=arrived_votes())

    def finish(
        self,
        save_id: str,
        metadata: Callable[[], bytes],
        *,
        wait: bool,
        extra: tuple[str, bytes] | None = None,
        in_memory: bool = True,
    ) -> None:
        """Makes the checkpoint exist, or raises SaveError; called by the coordinator once every rank has reported.

        A part that is sealed later is left to :meth:`seal_in_background`. The content of ``.metadata``, and ``extra``,
        the name and content of a small file, go with it. With ``wait``, returns once a durable save is committed there.
        ``in_memory`` says if all ranks have their parts on their nodes.
        """
        with self._lock:
            part, self._captured = self._captured, None
        if part is None or part.facts.save_id != save_id:
            raise SaveError(
                "a later save began before this one was finished",
                operation="finish",
                key=save_id,
                hint="wait for one save to end before the next",
            )
        facts = part.facts
        if not in_memory:
            # A memory-only save; the rank without room for it has warned.
            part.give_back()
            return
        beside = {facts.name_beside(extra[0]): extra[1]} if extra is not None else {}
        part.small = functools.cache(lambda: {METADATA: metadata(), **beside})
        if part.is_sealed_later:
            with self._lock:
                self._captured = part
            self._finished = facts
            # If a rank fails to seal its part now, only that rank knows.
            self._incomplete = None
            return
        try:
            self._seal(part)
        except MemoryFullError as error:
            skip(self._session, facts, error)
            return
        self.is_complete(facts.name, save_id, facts.step)
        self._incomplete = None
        self._report(part, wait=wait)

    def is_complete(self, name: str, save_id: str, step: int) -> None:
        """Takes note that a checkpoint is complete: this process finished it, or a restore has loaded it."""
        keep = max(1, self._session.config.memory_keep_last)
        series = self._series(name, step)
        self._completed[series] = sorted({*self._completed.get(series, ()), save_id})[-keep:]

    def _series(self, name: str, step: int) -> str:
        return "" if self._one_series else ids.series_of(name, step)

    # ------------------------------------------------------------------------------------- ranks
    def capture(self, part: PartSave) -> bool:
        """Captures this rank's items, and returns whether this node has them; later changes are not in the checkpoint.

        The part is sealed as well, except the coordinator's, which :meth:`finish` seals, and parts that
        :meth:`seal_in_background` seals. Without room, a memory-only save is skipped, with one warning; a durable one
        raises SaveError.
        """
        self.give_up()
        self.op_id = None
        facts = part.facts
        if part.image is not None and not part.image.size:
            part.image = Image(1, (Segment(0, memoryview(b"\0")),), (), planned=True)  # An empty file can't be mapped.
        if part.overlapped is not None and facts.left_out:
            # The save's caller takes the save for queued, and so may delete others for it, or save no other.
            self._session.background.lost.add(facts.name)
        if part.rank == facts.coordinator:
            # Until the other ranks have reported.
            part.small = None
        try:
            part.capture(self._session.open().tier.parts(), part.rules)
            if part.small is None or part.is_sealed_later:
                with self._lock:
                    self._captured = part
            else:
                self._seal(part)
                self._report(part)
        except MemoryFullError as error:
            part.give_back()
            skip(self._session, facts, error)
            with self._lock:
                self._captured = part if part.small is None else None
            return False
        except BaseException:
            # A copy of a state that has changed, or for which training no longer waited.
            part.give_back()
            raise
        return True

    def seal_in_background(self) -> None:
        """Hashes and seals, in the background, a part that was captured for that: see :attr:`sealing`.

        To be called when the save has succeeded on all ranks, and not before: messages that the ranks still
        have to send would wait for the processor.
        """
        with self._lock:
            part = self._captured
            if part is None or part.small is None or not part.is_sealed_later:
                return
            self._captured = None
        self._report(part)
        self.sealing = self._session.background.run(part.facts.name, lambda: self._seal(part))

    def give_up(self) -> None:
        """Frees the remains of an unfinished save: another rank failed, and DCP has raised on all ranks."""
        with self._lock:
            part, self._captured = self._captured, None
        if part is not None:
            facts = part.facts
            why = "another rank failed" if facts.world_size > 1 else "a later save began"
            self._session.log.at_step(facts.step).error("%s was not finished: %s", facts.name, why)
            # The rank that failed has noted why.
            self._session.count_failure(facts.name, facts.step, why, shared=facts.world_size > 1)
            part.give_back()

    # ------------------------------------------------------------------------------------ inside
    def _end_last(self) -> tuple[str, int, SaveError] | None:
        """Waits until this rank's part of the last save is sealed, or frees it; if sealing failed: name, step, why."""
        self.give_up()
        self._session.background.show()
        # The coordinator knows when it issues the next facts that all ranks have come past here.
        self._agreeing, self._finished = self._finished, None
        sealing, self.sealing = self.sealing, None
        if sealing is None or (error := sealing.exception(0)) is None:
            return None
        last = self._session.last_save
        failed = SaveError(
            f"the last save was captured, but not completed in memory: {error}",
            operation="save",
            tier="memory",
            hint="this save is not made; the next one is",
        )
        failed.__cause__ = error
        return (last.name, last.step, failed) if last is not None else ("", -1, failed)

    def _seal(self, part: PartSave) -> str | None:
        try:
            part.complete()
        except BaseException:
            # Its other files may not be there.
            part.give_back()
            self._session.background.lost.update([part.facts.name] if part.facts.durable else [])
            raise
        return part.op_id

    def _report(self, part: PartSave, *, wait: bool = False) -> None:
        self.op_id = part.op_id
        part.report(waited=wait and part.wait())
