"""What became of each operation of the drain, for those who wait; and when one that failed is due again."""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.engine.drain.operations import SAVES, Outcome, Request, State, unreplaced
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.report import Reporter
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.space import NO_SPACE
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart

_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0
#: What only a person can mend is looked at again this often.
_PERMANENT_BACKOFF_S = 60.0
_SCARCE = (errno.EMFILE, errno.ENFILE, *NO_SPACE)


@dataclass(slots=True)
class _Retry:
    attempts: int
    due: float
    permanent: bool


class Ledger:
    """The outcomes and next attempts of one drain's operations."""

    def __init__(self, queue: Queue, tier: MemoryTier, report: Reporter, log: Logger) -> None:
        """Takes where outcomes go, the parts that they are about, and who tells of them meanwhile."""
        self._queue = queue
        self._tier = tier
        self._report = report
        self._log = log
        self._retries: dict[str, _Retry] = {}
        self._unreplaced: list[Outcome] | None = None
        #: Since when something could not be written down, by the monotonic clock.
        self.troubled_at: float | None = None

    # ----------------------------------------------------------------------------------- looking
    @property
    def tried(self) -> Collection[str]:
        """The operations that have failed, and are to be tried again."""
        return self._retries.keys()

    def not_due(self, now: float) -> set[str]:
        """The operations whose next attempt is still to wait."""
        return {op_id for op_id, retry in self._retries.items() if retry.due > now}

    def only_a_person_can_mend(self, op_ids: Iterable[str]) -> bool:
        """Whether all of these that have failed will fail again, and some have."""
        failing = [self._retries[op_id] for op_id in op_ids if op_id in self._retries]
        return bool(failing) and all(retry.permanent for retry in failing)

    def without_successor(self) -> list[Outcome]:
        """See :func:`operations.unreplaced`."""
        if self._unreplaced is None:
            self._unreplaced = unreplaced(self._queue.outcomes())
        return self._unreplaced

    def look_again(self) -> None:
        """Has :meth:`without_successor` look anew: others may have noted something."""
        self._unreplaced = None

    # ----------------------------------------------------------------------------------- writing
    def keep(self, op_ids: set[str]) -> None:
        """Forgets what could not be told of operations that are no longer queued."""
        self._report.untold = self._report.untold & op_ids

    def retry_now(self) -> None:
        """Has what only a person can mend tried again."""
        for retry in self._retries.values():
            retry.due = min(retry.due, time.monotonic()) if retry.permanent else retry.due

    def retry_later(self, operation: Request, step: int, error: Exception, *, seconds: float) -> None:
        """Notes that an operation failed after ``seconds``, and plans its next attempt."""
        attempts = self._retries[operation.op_id].attempts + 1 if operation.op_id in self._retries else 1
        retryable = (isinstance(error, TieredCheckpointError) and error.retryable) or passes(error)
        backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (attempts - 1)) if retryable else _PERMANENT_BACKOFF_S
        self._retries[operation.op_id] = _Retry(attempts, time.monotonic() + backoff, not retryable)
        if attempts == 1:
            known = isinstance(error, TieredCheckpointError | OSError)
            self._log.error(
                "%s of %s failed, to be tried again: %s",
                operation.action,
                operation.name,
                error,
                exc_info=None if known else error,
            )
        self._note(operation, step, "failed", error=error, seconds=seconds, attempts=attempts, final=False)

    def finish(
        self,
        operation: Request,
        step: int,
        state: State,
        *,
        error: Exception | str = "",
        size: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Writes down how an operation ended: it leaves the queue.

        Args:
            operation: Which one.
            step: The training step; -1 where there is none.
            state: How it ended.
            error: Why not well.
            size: Bytes that were uploaded.
            seconds: How long that took.
        """
        retry = self._retries.pop(operation.op_id, None)
        attempts = (retry.attempts if retry else 0) + (state != "skipped")
        self._note(operation, step, state, error=error, size=size, seconds=seconds, attempts=attempts, final=True)

    def mark_drained(self, stored: StoredPart) -> None:
        """Notes in memory that the durable tier needs nothing more of a part."""
        try:
            self._tier.mark_drained(stored)
        except OSError as full:
            if stored.op_id not in self._report.untold:
                self._log.error("could not note that memory may let %s go: %s", stored.part.name, full)
            self._report.untold = self._report.untold | {stored.op_id}
            self._retries[stored.op_id] = _Retry(1, time.monotonic() + _FIRST_BACKOFF_S, permanent=False)

    def _note(
        self,
        operation: Request,
        step: int,
        state: State,
        *,
        error: Exception | str,
        attempts: int,
        final: bool,
        size: int = 0,
        seconds: float = 0.0,
    ) -> None:
        outcome = Outcome(
            operation.op_id,
            operation.action,
            operation.name,
            step,
            state,
            str(error),
            type(error).__name__ if isinstance(error, Exception) else "",
            size,
            seconds,
            time.time(),
            attempts,
            operation.dirpath,
        )
        if operation.action in SAVES:
            self._unreplaced = None
        try:
            self._queue.finish(outcome, final=final)
        except OSError as full:
            # The file system of the memory tier is full: what could be freed must be, outcome or none. Who waits
            # for this one sees that it is no longer on its way.
            if operation.op_id not in self._report.untold:
                self._log.error("could not note the outcome of %s: %s", operation.name, full)
            self._report.untold = self._report.untold | {operation.op_id}
            self.troubled_at = self.troubled_at or time.monotonic()
        else:
            self._report.untold = self._report.untold - {operation.op_id}
        self._queue.spares.fill()


def passes(error: BaseException) -> bool:
    """Whether it is for want of something that others of this node may give back."""
    return any(isinstance(each, OSError) and each.errno in _SCARCE for each in (error, error.__cause__))
