"""The drain: moves parts from node memory to the durable tier, commits there, and deletes.

One drain a node and namespace, held by a file lock; a process of its own, a thread, or a sidecar.
It outlives the trainer, takes up what a dead drain left, and imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.drain.gathering import Fate, Gathering
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.operations import (
    SAVES,
    Outcome,
    Request,
    State,
    held_back,
    next_operation,
    superseded,
    unreplaced,
)
from tiered_checkpoint_io.engine.drain.queue import Queue, operations_of
from tiered_checkpoint_io.engine.drain.report import Reporter
from tiered_checkpoint_io.engine.drain.retries import Retries, is_scarcity
from tiered_checkpoint_io.engine.drain.stores import Stores
from tiered_checkpoint_io.engine.durable import aliases, commit
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ManifestError,
    MemoryFullError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, rate
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store, open_store

LOCK_FILE = "drain.lock"
#: Not the one of releases without an operation log, whose drain must not stay for trainers that it cannot hear.
TRAINERS_FILE = "trainers2.lock"
EARLIER_TRAINERS_FILE = "trainers.lock"


class _Stopped(Exception):  # noqa: N818 - not an error: the way out of an upload when told to stop
    pass


class Drain:
    """The drain of one memory tier root."""

    def __init__(
        self,
        root: Path,
        *,
        logger: Logger | None = None,
        stop: threading.Event | None = None,
        stay: bool = False,
        open_store: Callable[[TieredCheckpointConfig, str | None], Store] = open_store,
        clock: Clock = SYSTEM,
    ) -> None:
        """Takes a root whose ``drain.json`` says how to reach the durable tier.

        Args:
            root: ``<memory_dir>/tiered-<uid>/<namespace>``.
            logger: Where to log.
            stop: Set from elsewhere to end the drain after the part in flight.
            stay: Whether to wait for further work when no trainer lives.
            open_store: Makes the store for a dirpath.
            clock: Time, and the bounds and intervals.
        """
        self._root = root
        self._clock = clock
        self._tier = MemoryTier(root, clock=clock)
        self._queue = Queue(root, clock=clock)
        self._log: Logger = logger or logging.getLogger(__name__)
        self._stop = stop or threading.Event()
        self._stay = stay
        self._stores = Stores(root, open_store, self._log)
        self._gathering = Gathering(self._log, clock)
        self._seen: set[str] = set()
        self._trainers: int | None = None
        self._report = Reporter(self._queue, self._stores.counters, clock)
        self._retries = Retries(clock)

    def run(self, *, once: bool = False) -> bool:
        """Works until there is nothing to do, and no trainer lives that could give more.

        Args:
            once: Return as soon as nothing is left that could be done now.

        Returns:
            False where another drain holds the lock, and nothing was done.
        """
        # Who asks whether a drain runs holds its lock for a moment.
        lock = try_lock(self._root / LOCK_FILE, patience_s=self._clock.timing.drain_lock_s, clock=self._clock)
        if lock is None:
            return False
        try:
            with self._report.beating():
                self._loop(once=once)
        finally:
            self._stores.close()
            release(lock)
            if self._trainers is not None:
                # Only now: a trainer that came meanwhile has waited for this, and finds no drain.
                release(self._trainers)
                self._trainers = None
        return True

    @property
    def trouble(self) -> str:
        """See :class:`DrainProgress`."""
        return self._report.trouble

    # -------------------------------------------------------------------------------- the loop
    def _loop(self, *, once: bool) -> None:
        clock, troubled_at, is_new = self._clock, None, True
        self._report.last_success = clock.monotonic()
        while not self._stop.is_set():
            try:
                if is_new:
                    self._reconcile()
                    is_new = False
                if self._turn(once=once):
                    return
                troubled_at, self._report.trouble = None, ""
            except OSError as error:
                # Out of descriptors, for one: the next look may find some. Nothing was begun that is not noted.
                if once or not is_scarcity(error):
                    raise
                if troubled_at is None:
                    self._log.error("cannot look at the queue, trying again: %s", error)
                    troubled_at = clock.monotonic()
                self._report.last_error = str(error)
                if clock.monotonic() - troubled_at > clock.timing.drain_trouble_s:
                    self._report.trouble = str(error)
                clock.wait(self._stop, clock.timing.drain_rest_s)

    def _reconcile(self) -> None:
        """Brings the log in line with the parts, which are the truth; takes over what an earlier release left."""
        try:
            self._queue.open()
            self._queue.take_over([stored for stored in self._tier.parts() if stored.pending])
        except MemoryFullError as full:
            # To go on without it frees what is full.
            self._log.error("outcomes are not noted: %s", full)
        operations, _ = self.pending()
        self._queue.forget_notes(operation.op_id for operation in operations)

    def _turn(self, *, once: bool) -> bool:
        """Does what can be done next; whether there is nothing more to stay for."""
        self._refuse_unreadable()
        version = self._queue.version()
        operations, parts = self.pending()
        self._report.pending = len(operations)
        op_ids = {operation.op_id for operation in operations}
        if op_ids - self._seen:
            # What fails for good is tried again when there is something new to do.
            self._seen = op_ids
            self._retries.retry_permanent_now()
        self._gathering.keep(op_ids)
        now = self._clock.monotonic()
        complete = self._gathering.complete()
        waiting = {op_id: due for op_id, due in self._retries.not_due(now).items() if op_id not in complete}
        waiting |= self._gathering.not_due(now)
        operation = next_operation(operations, waiting, unreplaced(self._queue.outcomes()))
        if operation is not None:
            self._execute(operation, operations, parts)
            self._report.write()
        elif once or (not self._stay and self._may_leave()):
            return True
        else:
            self._rest(version, min([*waiting.values(), now + self._clock.timing.full_look_s]))
        return False

    def _rest(self, version: tuple[int, int], until: float) -> None:
        """Waits for a change of the log, or until something is due; looks by itself now and then all the same."""
        clock = self._clock
        while not self._stop.is_set() and clock.monotonic() < until and self._queue.version() == version:
            clock.wait(self._stop, clock.timing.drain_rest_s)

    def pending(self) -> tuple[list[Request], dict[str, StoredPart]]:
        """All operations in order, and the parts of those that are saves, by their ids."""
        # A trainer may add to both while we look. What is asked for behind a save must not be taken up
        # without it: an alias would find no target, and be given up.
        seen = {request.op_id for request in self._queue.requests()}
        parts = {stored.op_id: stored for stored in self._tier.parts() if stored.pending}
        newest = max(parts, default="")
        requests = [each for each in self._queue.requests() if each.op_id in seen or each.op_id < newest]
        return operations_of(parts.values(), requests), parts

    def _refuse_unreadable(self) -> None:
        for op_id in self._queue.unreadable():
            error = ManifestError("the request can't be understood", operation="drain", tier="memory", key=op_id)
            self._log.error("%s", error)
            self._finish(Request(op_id, "unknown", op_id, ""), -1, "failed", error=error)

    def _may_leave(self) -> bool:
        trainers = try_lock(self._root / TRAINERS_FILE)
        if trainers is None:
            self._report.last_success = self._clock.monotonic()
            return False
        # Looked at under the lock: no trainer can add to it now.
        operations, _ = self.pending()
        held = held_back(operations, unreplaced(self._queue.outcomes()))
        left = [operation for operation in operations if operation not in held]
        overdue = self._clock.monotonic() - self._report.last_success > self._clock.timing.drain_give_up_s
        # To stay would be in vain for what fails for good: the next start may bring other credentials than ours.
        permanent = self._retries.all_permanent(operation.op_id for operation in left)
        if left and not overdue and (not permanent or self._gathering.hopeful()):
            release(trainers)
            return False
        if operations:
            self._log.error(
                "leaving %d operations for the next start to take up. Last error: %s",
                len(operations),
                self._report.last_error or "none",
            )
        self._trainers = trainers
        return True

    # ------------------------------------------------------------------------------ operations
    def _execute(self, operation: Request, operations: list[Request], parts: dict[str, StoredPart]) -> None:
        started = self._clock.monotonic()
        stored = parts.get(operation.op_id)
        step = stored.part.content.step if stored else -1
        size = stored.part.content.size if stored else 0
        try:
            if operation.action == "cancel":
                self._cancel(operation, operations, parts)
            elif stored is not None:
                began = self._gathering.since(operation.op_id)
                started = started if began is None else began
                fate = self._save(stored)
                if fate == "replaced":
                    self._give_up(stored, "a later save has taken its name")
                if fate != "done":
                    return
            else:
                store = self._stores.get(operation.dirpath)
                journal = self._queue.journal(operation.op_id)
                if operation.action == "alias":
                    aliases.put_alias(store, operation.name, operation.target, before=operation.op_id, journal=journal)
                else:
                    aliases.delete(store, operation.name, before=operation.op_id, journal=journal)
        except _Stopped:
            return
        except Exception as error:
            # Whatever it is, it is this operation's: the drain has others to carry out.
            self._failed(operation, stored, step, error, self._clock.monotonic() - started)
            return
        seconds = self._clock.monotonic() - started
        self._report.succeeded(size, seconds)
        self._finish(operation, step, "committed", size=size, seconds=seconds)
        if stored is not None:
            # Before it leaves the queue: who waits for all that is queued must not find just those that failed.
            for old in superseded(operations, {*self._retries.tried, *self._gathering.overtaken()}, operation):
                self._give_up(parts[old.op_id], f"superseded by {operation.name}")
            # Behind the outcome: a drain that dies in between finds it committed, and says so again.
            self._mark_drained(stored)
            what = (
                "is durable" if stored.part.commits else f"has its part of rank {stored.part.rank} on the durable tier"
            )
            self._log.info("Step %d: %s %s: %s", step, operation.name, what, rate(size, seconds))
            self._queue.prune()

    def _save(self, stored: StoredPart) -> Fate:
        part = stored.part
        store = self._stores.get(part.dirpath)
        journal = self._queue.journal(stored.op_id)
        with self._report.uploading(part.name, part.content.size), self._tier.reading(stored) as views:
            return self._gathering.drain(
                store,
                part,
                views,
                journal=journal,
                progress=self._progress,
                timeout_s=self._stores.config.wait_timeout_s,
                busy=lambda: self._later_names(part.save_id),
            )

    def _later_names(self, save_id: str) -> set[str]:
        """Names of queued saves that were made after one."""
        return {part.name for part in (stored.part for stored in self.pending()[1].values()) if part.save_id > save_id}

    def _progress(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._report.add(count)

    def _cancel(self, operation: Request, operations: list[Request], parts: dict[str, StoredPart]) -> None:
        for other in operations:
            if other.action in SAVES and ids.save_id_of_op(other.op_id) == ids.save_id_of_op(operation.target):
                self._give_up(parts[other.op_id], "cancelled to keep the queue bounded")

    def _give_up(self, stored: StoredPart, reason: str) -> None:
        part, journal = stored.part, self._queue.journal(stored.op_id)
        if journal.read() is not None and stored.op_id not in self._retries.tried:
            # What cannot be abandoned now is found by the next look for stale uploads.
            with contextlib.suppress(TieredCheckpointError):
                commit.abandon(self._stores.get(part.dirpath), part, journal)
        self._gathering.forget(stored.op_id)
        self._log.warning("%s will not be durable: %s", part.name, reason)
        (operation,) = operations_of([stored], ())
        self._finish(operation, part.content.step, "skipped", error=reason)
        self._mark_drained(stored)

    def _failed(
        self, operation: Request, stored: StoredPart | None, step: int, error: Exception, seconds: float
    ) -> None:
        self._report.last_error = str(error)
        if isinstance(error, CorruptCheckpointError) and stored is not None:
            self._finish(operation, step, "failed", error=error)
            where = self._tier.quarantine(stored.folder, str(error))
            self._queue.ring()
            self._log.error("%s is corrupt in memory and was moved to %s: %s", operation.name, where, error)
        elif isinstance(error, CheckpointNotFoundError):
            # A save that was removed from memory, or an alias whose target was given up: then the
            # old alias still names what is good.
            self._log.warning("%s", error)
            self._finish(operation, step, "skipped", error=error)
        else:
            if self._retries.failed(operation.op_id, error) == 1:
                known = isinstance(error, TieredCheckpointError | OSError)
                text = "%s of %s failed, to be tried again: %s"
                self._log.error(text, operation.action, operation.name, error, exc_info=None if known else error)
            self._finish(operation, step, "failed", error=error, seconds=seconds, final=False)

    # -------------------------------------------------------------------------------- outcomes
    def _finish(
        self,
        operation: Request,
        step: int,
        state: State,
        *,
        error: Exception | str = "",
        size: int = 0,
        seconds: float = 0.0,
        final: bool = True,
    ) -> None:
        """Writes down how an operation ended; a final outcome takes it off the queue.

        Args:
            operation: Which one.
            step: The training step; -1 where there is none.
            state: How it ended.
            error: Why not well.
            size: Bytes that were uploaded.
            seconds: How long that took.
            final: Whether it is not tried again.
        """
        what = "uploaded" if operation.action == "part" and state == "committed" else state
        self._report.counts[what] += 1
        attempts = self._retries.attempts(operation.op_id) + (final and state != "skipped")
        if final:
            self._retries.forget(operation.op_id)
        error_type = type(error).__name__ if isinstance(error, Exception) else ""
        outcome = Outcome(
            operation.op_id,
            operation.action,
            operation.name,
            step,
            state,
            str(error),
            error_type,
            size,
            seconds,
            self._clock.wall(),
            attempts,
            operation.dirpath,
        )
        try:
            self._queue.finish(outcome, final=final)
        except MemoryFullError as full:
            # No log could be made: memory was full already when this release started. To go on frees it.
            self._log.error("could not note the outcome of %s: %s", operation.name, full)

    def _mark_drained(self, stored: StoredPart) -> None:
        """Notes in memory that the durable tier needs nothing more of a part."""
        try:
            self._tier.mark_drained(stored)
        except OSError as error:
            # Of a part that an earlier release made, and that has no space for the mark.
            self._log.error("could not note that memory may let %s go: %s", stored.part.name, error)
            self._retries.failed(stored.op_id, error)
        self._queue.journal(stored.op_id).clear()
        self._queue.ring()
