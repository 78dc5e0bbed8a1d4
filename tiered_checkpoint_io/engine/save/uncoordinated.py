"""Saving a local checkpoint: each rank its own state, as one file, without asking any other rank.

``local_run`` explains how the ranks' save ids agree. On the durable tier the checkpoint exists once the parts of all
shards are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks.run import LeftBehindError, Where, current_run
from tiered_checkpoint_io.engine.save.facts import SaveFacts, admit, skip, uncoordinated
from tiered_checkpoint_io.engine.save.overlap import OF_PARTS, say_eager
from tiered_checkpoint_io.engine.save.part import PartSave
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.retention import complete_here
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ShardRole:
    """A rank's shard of a state.

    Attributes:
        shard: Its number, from 0 on.
        degree: Number of shards of the state.
        writes: True if this rank saves it: one of those that hold the same.
    """

    shard: int = 0
    degree: int = 1
    writes: bool = True


@dataclass(frozen=True, slots=True)
class LocalSave:
    """Result of a local save.

    Attributes:
        report: Report on the part, which is in memory or in a background task.
        op_id: The drain's operation that uploads it; None if none does.
    """

    report: SaveReport
    op_id: str | None = None


def save_local(
    session: Session,
    surface: Callable[[], None],
    planned: Callable[[], Image],
    role: ShardRole,
    *,
    name: str,
    step: int,
    repeat: int,
    durable: bool,
    wait: bool = False,
    threads: int | None = None,
) -> LocalSave | None:
    """Captures this rank's shard on its node, and queues its upload.

    Args:
        session: Both tiers.
        surface: Raises failures of earlier saves, which stop this one. It is called here, as ``planned`` is, so that
            the other ranks learn of a failure: they then remove nothing for this save.
        planned: Plans the state's file.
        role: Shard of this rank.
        name: The checkpoint's name.
        step: The training step; -1 if it is not known.
        repeat: See :func:`count_save`, which is called first, also on ranks that do not save.
        durable: True to save it to the durable tier, if its queue has room.
        wait: True to return, on all ranks, only when the checkpoint is committed there; see :meth:`PartSave.wait`.
        threads: Number of threads that copy.

    Returns:
        None if a memory-only save was skipped because there is no room.

    Raises:
        SaveError: Neither memory nor the spill has room for a durable save; or, on all ranks that wait, the save did
            not reach the durable tier.
        ConfigError: The run's id could not be learnt; or another live run writes to the same dirpath.
        Exception: Errors of ``surface`` or ``planned``.
    """
    started = session.clock.monotonic()
    held, failure = _look(session, surface, role, durable=durable)

    def ask() -> SaveFacts:
        degree = role.degree
        return uncoordinated(session, name, step=step, repeat=repeat, degree=degree, durable=durable, held=held)

    try:
        facts = _answered(session, ask)
    except ConfigError as error:
        raise (failure or error) from None
    run = _RunWide(session, facts, role.shard)
    try:
        if failure is not None:
            raise failure
        facts = admit(session, facts, held)
        if durable and not facts.durable:
            run.report_missing("durable")
        part = PartSave(session, facts, role.shard, planned(), threads, started)
        part.capture(retained=_make_room(part, held, run))
        part.seal()
    except Exception as error:
        run.report_missing("memory")
        if isinstance(error, MemoryFullError):
            skip(session, facts, error)
            return None
        if durable:
            run.report_missing("durable")
        raise
    part.prepare_next()
    if wait and facts.left_out:
        part.wait()
    waited = wait and facts.durable and run.wait(part)
    return LocalSave(part.report(waited=waited), part.op_id)


def _look(
    session: Session, surface: Callable[[], None], role: ShardRole, *, durable: bool
) -> tuple[Collection[StoredPart], Exception | None]:
    """Returns the parts in this node's memory, and this rank's error, to be raised once the other ranks know of it."""
    held: Collection[StoredPart] = ()
    try:
        # First: the id of a run follows from the saves that are here.
        held = session.open().tier.parts()
        surface()
        session.claims.check()
        if role.shard == 0:
            say_eager(session, OF_PARTS)
            if durable:
                session.claims.claim()
    except Exception as error:
        return held, error
    return held, None


def _answered(session: Session, ask: Callable[[], _T]) -> _T:
    """Returns the result of ``ask``; if the store of torch.distributed fails, asks again for ``pending_timeout_s``.

    Raises:
        ConfigError: The store has not answered for so long; at once if this rank was left behind.
    """
    clock, began, is_said = session.clock, session.clock.monotonic(), False
    while True:
        try:
            return ask()
        except LeftBehindError:
            raise
        except ConfigError as error:
            if clock.monotonic() - began >= session.config.support.pending_timeout_s or session.is_preempted:
                raise
            if not is_said:
                session.log.warning("a save waits for the store of torch.distributed: %s", error)
            is_said = True
        clock.sleep(clock.timing.local_poll_s)


def _make_room(part: PartSave, held: Collection[StoredPart], run: _RunWide) -> tuple[str, ...]:
    """Removes parts that memory need not keep; returns the saves that must stay even if the new one does not fit."""
    session = part.session
    scope = part.facts.scope(part.rank, session.place)
    lacking = run.lacking({each.save_id for each in held if scope.covers(each) and scope.of_this_run(each)})
    if lacking is None:
        return tuple(each.save_id for each in held)
    evidence = complete_here(held, scope, lacking)
    assert part.image is not None
    # This save adds one checkpoint; memory keeps at least two, because this save may fail.
    part.retain(list(held), max(1, session.config.memory_keep_last - 1), evidence, size=part.image.size)
    return evidence.completed[-1:]


class _RunWide:
    """Exchange between the ranks of a run about saves of which a part is missing."""

    def __init__(self, session: Session, facts: SaveFacts, shard: int) -> None:
        self._session = session
        self._facts = facts
        self._shard = shard
        self._run = current_run()

    def report_missing(self, where: Where) -> None:
        """Reports to the other ranks that this rank's part is not in memory, or will not come to the durable tier."""
        try:
            self._run.report_missing(self._facts.save_id, where)
        except ConfigError as error:
            # The save continues, or has failed already for a more important reason.
            self._session.log.at_step(self._facts.step).warning(
                "could not tell the other ranks that the part of shard %d is missing: %s", self._shard, error
            )

    def wait(self, part: PartSave) -> bool:
        """Waits as :meth:`PartSave.wait`, for the whole checkpoint: shard 0 reports the commit to the other ranks."""
        if part.facts.world_size == 1:
            return part.wait()
        if self._shard != part.facts.coordinator:
            return part.wait() and self._wait_for_commit(part)
        try:
            with self.watch() as is_hopeless:
                waited = part.wait(is_hopeless)
        except Exception as error:
            self._report_end(str(error))
            raise
        self._report_end("committed" if waited else "queued")
        return waited

    def _report_end(self, end: str) -> None:
        try:
            self._run.report_end(self._facts.save_id, end)
        except ConfigError as error:
            self._session.log.at_step(self._facts.step).warning(
                "could not tell the other ranks what became of the save: %s", error
            )

    def _wait_for_commit(self, part: PartSave) -> bool:
        clock, timeout_s = self._session.clock, self._session.config.support.wait_timeout_s
        began = clock.monotonic()
        while (end := self._end(part)) is None:
            waited_s = clock.monotonic() - began
            if waited_s >= timeout_s:
                end = f"shard 0 has not told of its commit within {timeout_s} s"
                break
            clock.sleep(clock.timing.pause_s(clock.timing.local_poll_s, waited_s))
        if end not in ("committed", "queued"):
            raise part.not_durable(end)
        return end == "committed"

    def _end(self, part: PartSave) -> str | None:
        """See :meth:`Run.end_of`; ``queued`` if the store does not answer, and training is to continue."""
        try:
            return _answered(self._session, lambda: self._run.end_of(self._facts.save_id))
        except ConfigError as error:
            if self._session.config.on_save_error == "raise":
                raise part.not_durable(str(error)) from error
            self._session.log.at_step(self._facts.step).warning(
                "it is not known whether %s is committed: %s; training continues", self._facts.name, error
            )
            return "queued"

    def lacking(self, save_ids: Collection[str]) -> set[str] | None:
        """Returns the saves of which some node's memory has no part; None if that can't be known."""
        try:
            return self._run.lacking(sorted(save_ids))
        except ConfigError as error:
            self._session.log.at_step(self._facts.step).warning(
                "retention skipped: it is not known whether the newer checkpoint is complete: %s", error
            )
            return None

    def watch(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """See :meth:`Run.watching`."""
        return self._run.watching(self._facts.save_id, self._session.log, self._session.clock)
