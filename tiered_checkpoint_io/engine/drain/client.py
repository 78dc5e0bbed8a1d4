"""The trainer's side of the drain: queues for it, watches it, and waits for it, within bounds."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.drain.log import LOG_SIZE
from tiered_checkpoint_io.engine.drain.operations import (
    SAVES,
    Outcome,
    Request,
    blocked_by_failures,
    needed,
)
from tiered_checkpoint_io.engine.drain.process import CANNOT_IMPORT, reap, start_process
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.serving import ask_to_serve, served_at
from tiered_checkpoint_io.engine.drain.status import LOG, StandstillError, tier_label
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.replication.replicas import leave_groups
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.logs import QUIET, Logger, names_text
from tiered_checkpoint_io.memory.node import (
    MemoryFullError,
    is_locked,
    is_lost,
    release,
    share,
    try_lock,
    write_atomic,
    write_over,
)
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.peer import Endpoint

#: Ids of operations that were made before this process began sort before it.
_BEGAN = ids.new_run_id()
#: A shorter wait for room in the queue is not logged, seconds.
_NOTED_WAIT_S = 1.0
#: Outcomes that are remembered as taken: more than the log keeps.
_SEEN = 2048
_MOVING = ("answers", "bytes.sent", "committed", "uploaded", "failed", "skipped")
_ORPHANED = "an earlier start left it, and parts of other nodes do not come: they may be lost"


class DrainHandle:
    """One process' connection to the drain of its node."""

    def __init__(
        self, tier: MemoryTier, config: TieredCheckpointConfig, logger: Logger, *, clock: Clock = SYSTEM
    ) -> None:
        self._tier = tier
        self._config = config
        self._log = logger
        self._clock = clock
        self.queue = Queue(tier.root, clock=clock)
        #: The drain's last report about itself.
        self.progress = self.queue.progress
        #: The drain's figures at the last look; and those at which a wait ended because they stood still.
        self._figures: tuple[int, ...] = ()
        self._stood_still: tuple[int, ...] | None = None
        self._root, self._pid = tier.root, os.getpid()
        self._trainer_lock: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._drain: Drain | None = None
        self._stop = threading.Event()
        self._spawned_at, self._respawn_wait = 0.0, clock.timing.respawn_s
        #: A thread that replicates asks for it too.
        self._serving = threading.Lock()
        #: The save that the last :meth:`has_room` gave up.
        self.given_up = ""
        #: Operations that were queued before this process began.
        self._inherited = frozenset(self.pending())
        #: Time since which only saves that wait for other nodes' parts are left.
        self._stuck_since = math.inf
        #: The end of all waits, by the monotonic clock: the process has to end then.
        self.leave_by: float | None = None
        #: Outcomes that are not new: those before the start, and those that were taken or waited for.
        self._seen = set(map(_key, self.queue.outcomes()))
        self._seen_at, self._trouble = b"", ""
        #: Times of failures before this process began: these operations are tried again, perhaps with success.
        self._earlier = {each.op_id: each.finished for each in self.queue.outcomes() if each.state == "failed"}
        tier.bell = self.queue.ring

    # ----------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Announces this trainer, and makes sure that a drain runs; ended namespaces give room for the operation log.

        Raises MemoryFullError if there is no space.
        """
        try:
            self._start()
        except MemoryFullError as full:
            if advice := self._tier.find_room(LOG_SIZE):
                raise full.reworded(full.message, hint=f"{full.hint}; {advice}") from full
            self._start()

    def _start(self) -> None:
        if self.is_foreign:
            return
        reap()
        if self._trainer_lock is not None and is_lost(self._trainer_lock):
            # Another process removed this memory: the drain needs new files.
            release(self._trainer_lock)
            self._trainer_lock = None
        if self._trainer_lock is None:
            self.queue.open()
            self._write_config()
            is_first = self._join()
            if is_first:
                # An earlier job may have asked for another address.
                ask_to_serve(self._root, "")
                leave_groups(self._root)
            if is_first and self._config.support.drain == "process":
                self._follow(self.queue.announced())
        self.ensure()

    def _join(self) -> bool:
        """Takes the trainers' lock; returns whether no other trainer has it. Raises DrainError if a drain keeps it."""
        path, timing = self._root / TRAINERS_FILE, self._clock.timing
        # A drain that looks whether a trainer lives has it for a moment.
        lock = try_lock(path, patience_s=timing.drain_lock_s, clock=self._clock)
        is_first = lock is not None
        if lock is None:
            lock = try_lock(path, shared=True, patience_s=timing.trainers_lock_s, clock=self._clock)
        else:
            share(lock)
        if lock is None:
            text = "a drain that should have ended still holds the trainers' lock"
            raise DrainError(text, operation="start", tier="memory", key=str(path))
        self._trainer_lock = lock
        return is_first

    def _follow(self, token: str) -> None:
        """Asks the drain of an earlier trainer, which may still work, to leave, and starts ours, which waits for it."""
        if token:
            # If there is no space to ask, that drain continues.
            with contextlib.suppress(MemoryFullError):
                self.queue.ask_to_leave(token)
            self._spawn()

    def _write_config(self) -> None:
        path, text = self._root / CONFIG_FILE, self._config.to_json().encode()
        if not path.exists() or path.read_bytes() != text:
            try:
                write_atomic(path, text)
            except MemoryFullError:
                if not path.exists():
                    raise
                # The file has a page of its own.
                write_over(path, text)

    def ensure(self) -> None:
        """Starts a drain if none runs; one that dies again and again is started ever more rarely."""
        if self.is_foreign or self.is_running:
            return
        now, timing = self._clock.monotonic(), self._clock.timing
        if self._spawned_at and now - self._spawned_at < self._respawn_wait:
            return
        if self._spawned_at:
            self._respawn_wait = min(timing.respawn_max_s, self._respawn_wait * 2)
        if self._child is not None or self._thread is not None:
            self._log.warning("the drain has ended; starting it again: %s", self.last_words())
        self._spawn()

    def _spawn(self) -> None:
        self._spawned_at = self._clock.monotonic()
        try:
            if self._config.support.drain != "thread":
                self._child = start_process(self._root, self._log)
                return
            self._stop = threading.Event()
            # The trainer logs outcomes: the drain's own messages would repeat them.
            quiet = self._log if self._log.isEnabledFor(logging.DEBUG) else QUIET
            drain = Drain(self._root, logger=quiet, stop=self._stop, stay=True, clock=self._clock)
            self._thread = self._clock.start(functools.partial(self._run, drain), "tiered-drain")
            self._drain = drain
        except MemoryFullError:
            raise
        except OSError as error:
            # The system allows no more processes, threads or descriptors: no reason to take saves for failed.
            self._log.warning("the drain can't be started, so nothing is uploaded; to be tried again: %s", error)

    def _run(self, drain: Drain) -> None:
        try:
            drain.run()
        except Exception as error:
            # The next call that needs it starts it again.
            self._log.error("the drain has ended: %s", error)

    def _leave(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._stop.set()
            self._clock.join(self._thread, timeout_s)
            self._thread = self._drain = None
        if self._trainer_lock is not None:
            release(self._trainer_lock)
            self._trainer_lock = None
            self.queue.ring()
        # The next start reaps the process, or init, which adopts it when this process ends.
        self._child = None
        self._spawned_at = 0.0

    def serve(self, address: str) -> Endpoint:
        """Lets the drain serve this node's memory; returns the endpoint, or raises DrainError if that is late."""
        root, clock, timing = self._tier.root, self._clock, self._clock.timing
        deadline = clock.monotonic() + timing.serve_s
        with self._serving:
            while clock.monotonic() < deadline and not self.cannot_import:
                found = served_at(root, address, clock) if self._trainer_lock is not None else None
                if found is not None:
                    return found
                self.start()
                ask_to_serve(root, address)
                self.queue.ring()
                clock.sleep(timing.wait_poll_s)
        self._check_drain()
        raise self._error(f"the drain does not serve at {address}", str(root), "see its log", tier="memory")

    def close(self, *, timeout_s: float) -> None:
        """Leaves the drain to itself. A thread ends once it has uploaded and replicated, or at the timeout."""
        if self.is_foreign:
            return
        if self._thread is not None:
            with contextlib.suppress(DrainError):
                self.flush(timeout_s)
            if self.leave_by is not None:
                timeout_s = min(timeout_s, max(0.0, self.leave_by - self._clock.monotonic()))
            deadline = self._clock.monotonic() + timeout_s
            while self._drain is not None and self._drain.is_replicating and self._clock.monotonic() < deadline:
                self._clock.sleep(self._clock.timing.wait_poll_s)
        self._leave(timeout_s)
        self.queue.close()

    # ----------------------------------------------------------------------------------- state
    @property
    def is_foreign(self) -> bool:
        """True in a forked child (a DataLoader's worker): it has our memory, but not our role."""
        return os.getpid() != self._pid

    @property
    def is_running(self) -> bool:
        """True if a drain runs, of this process or another."""
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._child is not None and self._child.poll() is None:
            return True
        return is_locked(self._root / LOCK_FILE)

    @property
    def has_worked(self) -> bool:
        """True if this process or an earlier one ever started a drain over this memory."""
        return (self._root / CONFIG_FILE).exists()

    @property
    def trouble(self) -> str:
        """See :attr:`DrainProgress.trouble`."""
        return self._drain.trouble if self._drain is not None else self.queue.progress().trouble

    @property
    def cannot_import(self) -> bool:
        """True if no drain runs because the last one started here can't import a module."""
        return self._child is not None and self._child.poll() == CANNOT_IMPORT and not self.is_running

    def last_words(self) -> str:
        """Returns the path of the drain's log, and its last line."""
        path, last = self._root / LOG, ""
        with contextlib.suppress(OSError):
            last = path.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"{path} ends with: {last}" if last else f"see {path}"

    # ----------------------------------------------------------------------------------- work
    def submit(self, request: Request) -> None:
        """Queues an alias, delete or cancel."""
        if not self.is_foreign:
            self.queue.submit(request)
            self.start()

    def pending(self) -> list[str]:
        """Returns the ids of all operations that wait for the drain, in order."""
        return [operation.op_id for operation in self.queue.look(self._tier)]

    def pending_saves(self) -> list[str]:
        """Returns the ids of the saves of which parts of this node wait for the drain, in order."""
        return sorted({ids.save_id_of_op(each.op_id) for each in self.queue.look(self._tier) if each.action in SAVES})

    def is_inherited(self, outcome: Outcome) -> bool:
        """Returns True if an earlier start left this operation in the queue."""
        return outcome.op_id in self._inherited and outcome.op_id < _BEGAN

    def has_room(self, cancel_id: str, *, besides: str = "") -> bool:
        """Waits until one more save may be queued, or for ``pending_timeout_s``; returns whether it may.

        A drain without progress since the last such wait is not waited for again. If saves fail, the oldest is
        :attr:`given_up` for the new one by a request ``cancel_id``, one that is :func:`needed` last: the queue stays
        bounded. ``besides`` is the save to be queued, of which other ranks may have queued parts.
        """
        max_pending, self.given_up = self._config.support.max_pending, ""
        began, patience_s = self._clock.monotonic(), self._config.support.pending_timeout_s
        for still_s in self._looks(self._config.support.wait_timeout_s):
            requests = self.queue.requests()
            cancelled = {ids.save_id_of_op(request.target) for request in requests if request.action == "cancel"}
            waiting = [each for each in self.pending_saves() if each != besides and each not in cancelled]
            waited_s = self._clock.monotonic() - began
            if len(waiting) < max_pending and len(cancelled) <= max_pending:
                if waited_s >= _NOTED_WAIT_S:
                    self._log.warning("training waited %.1f s until one of %d uploads had ended", waited_s, max_pending)
                return True
            lost = {
                ids.save_id_of_op(op_id): failure.error
                for op_id in self.pending()
                if (failure := self._failure(op_id) or self._late(op_id))
            }
            orphans = self._orphans(waiting)
            failed = [save_id for save_id in waiting if save_id in lost.keys() | orphans]
            # A drain that its store holds up frees cancelled parts only later: that wait is bounded, too.
            if failed and len(cancelled) < max_pending:
                wanted = needed(self.queue.look(self._tier))
                oldest = min(failed, key=lambda save_id: (save_id in wanted, save_id))
                why = lost.get(oldest, _ORPHANED)
                self._log.error("giving up the oldest failed upload, as %d wait already: %s", len(waiting), why)
                self.given_up = oldest
                self.cancel(cancel_id, oldest)
                return True
            if self.leave_by is not None:
                # The time that is left to a job that has to end is for its last checkpoint.
                return False
            if still_s >= patience_s:
                self._stood_still = self._figures
                return False
            if waited_s >= patience_s:
                return False
        return False

    def cancel(self, op_id: str, save_id: str) -> None:
        """Gives up a queued save."""
        server = self._tier.place.server if self._tier.place is not None else None
        self.queue.submit(Request(op_id, "cancel", "cancel", self._config.dirpath, save_id, server=server))

    def _orphans(self, waiting: Collection[str]) -> set[str]:
        """Returns saves of an earlier start that only wait for parts of other nodes, after ``pending_timeout_s``."""
        queued = [each for each in self.queue.look(self._tier) if ids.save_id_of_op(each.op_id) in waiting]
        sent = [commit.is_sent(self.queue.journal(each.op_id)) for each in queued if each.action == "save"]
        inherited = {ids.save_id_of_op(each) for each in self._inherited}
        if not waiting or not inherited.issuperset(waiting) or sent != [True] * len(queued):
            self._stuck_since = math.inf
            return set()
        self._stuck_since = min(self._stuck_since, self._clock.monotonic())
        is_late = self._clock.monotonic() - self._stuck_since >= self._config.support.pending_timeout_s
        return set(waiting) if is_late else set()

    def wait(
        self,
        op_id: str,
        timeout_s: float,
        is_hopeless: Callable[[], bool] = lambda: False,
        *,
        moving_s: float = math.inf,
    ) -> Outcome:
        """Returns the outcome of an operation: its commit, or its first failure.

        Waits for ``timeout_s`` in all, and for ``moving_s`` while the drain makes no progress. ``is_hopeless`` says if
        another rank has reported that its part of the save will not come.

        Raises:
            StandstillError: No progress for ``moving_s``, or the process has to end. The operation stays queued.
            DrainError: No outcome within ``timeout_s`` seconds, a hopeless save, or an unknown outcome.
        """
        for still_s in self._looks(timeout_s):
            is_pending = op_id in self.pending()
            outcome = self.queue.outcome(op_id)
            # The outcome is written first: then its waiters may look at the memory tier.
            if outcome is None and not is_pending:
                error = "the operation log was lost, so how it ended is not known: see the durable tier"
                outcome = Outcome(
                    *(op_id, "save", "?", -1, "failed", error, "DrainError"),
                    finished=self._clock.wall(),
                    dirpath=self._config.dirpath,
                )
            if outcome is not None and not (outcome.state == "committed" and is_pending):
                self._seen.add(_key(outcome))
                return outcome
            self._check_drain()
            # The time that is left is for the job's last checkpoint.
            is_leaving = moving_s < math.inf and self.leave_by is not None
            if is_leaving or still_s >= moving_s:
                if not is_leaving:
                    self._stood_still = self._figures
                where, hint = tier_label(self._config.dirpath), "it stays queued, and is uploaded once that is possible"
                text = "the job has to end" if is_leaving else f"nothing has reached {where} for {moving_s:.0f} s"
                raise StandstillError(text, operation="drain", tier="durable", key=self._config.dirpath, hint=hint)
            if is_hopeless():
                text, hint = "a rank has no part of it", "see that rank's log; it stays in node memory"
                raise DrainError(text, operation="drain", tier="durable", key=self._config.dirpath, hint=hint)
        raise self._too_slow(f"operation {op_id}", timeout_s)

    def flush(self, timeout_s: float, *, only: Collection[str] | None = None) -> None:
        """Waits until no queued operation can be done now; with ``only``, none of these operations.

        Logs the wait every ``say_wait_s``. Raises DrainError if something is queued after ``timeout_s`` seconds, or
        fails.
        """
        left: list[Request] = []
        began = said = self._clock.monotonic()
        for _ in self._looks(timeout_s):
            left = [each for each in self.queue.look(self._tier) if only is None or each.op_id in only]
            if not left:
                return
            self._check_drain()
            first = self._stuck_by(left)
            if first is not None:
                text, url = f"{first.name} did not reach the durable tier: {first.error}", first.url
                raise self._error(text, url, "it stays in node memory and is tried again")
            # A caller that names operations wants to wait for them.
            saves = {ids.save_id_of_op(each.op_id) for each in left if each.action in SAVES and only is None}
            orphans = self._orphans(saves)
            if orphans and {each.op_id for each in left} <= orphans | blocked_by_failures(left, orphans):
                # No outcome reports this.
                url = ids.join_url(self._config.dirpath, left[0].name)
                raise self._error(f"{left[0].name}: {_ORPHANED}", url, "the drain keeps looking for them")
            now = self._clock.monotonic()
            if now - said >= self._clock.timing.say_wait_s:
                said, ends = now, min(began + timeout_s, math.inf if self.leave_by is None else self.leave_by)
                self._say_wait([each.name for each in left if each.action in SAVES], now - began, ends - now)
        raise self._too_slow(f"{len(left)} operations", timeout_s)

    def news(self, *, keeps_up: bool = False) -> tuple[list[Outcome], str]:
        """Returns each outcome once, and :attr:`DrainProgress.trouble`.

        With ``keeps_up``, it starts again a drain that has died with work left, if this process had one run.
        """
        if keeps_up and self._trainer_lock is not None and self.leave_by is None and not self.is_foreign:
            try:
                if not self.is_running and self.pending():
                    self.ensure()
            except OSError as error:
                # Out of descriptors or processes, for one: the next look tries again.
                self._log.error("the drain has died, and could not be started again: %s", error)
        version, fresh = self.queue.poll_with_heartbeat(), list[Outcome]()
        if version != self._seen_at:
            outcomes = self.queue.outcomes()
            fresh = [outcome for outcome in outcomes if _key(outcome) not in self._seen]
            self._seen_at, self._trouble = version, self.progress().trouble
            self._seen.update(map(_key, fresh))
            if len(self._seen) > _SEEN:
                # Outcomes that the log has forgotten do not come again.
                self._seen.intersection_update(map(_key, outcomes))
        return fresh, self._trouble

    # ---------------------------------------------------------------------------------- inside
    def _looks(self, timeout_s: float) -> Iterator[float]:
        """Lets a waiting caller look at once, and whenever something has changed, until it is late.

        Yields for how many seconds of this wait the drain has made no progress; more than any bound if an earlier wait
        ended for that, and nothing has moved since.
        """
        clock, timing = self._clock, self._clock.timing
        deadline = clock.monotonic() + timeout_s
        moved, is_late = clock.monotonic(), False
        self._figures = self._moving()
        while not is_late:
            version, looked_at, before = self.queue.version(), clock.monotonic(), self._figures
            self._figures = self._moving()
            moved = moved if self._figures == before else looked_at
            yield sys.float_info.max if self._figures == self._stood_still else looked_at - moved
            self.ensure()
            while version == self.queue.version() and clock.monotonic() - looked_at < timing.full_look_s:
                is_late = clock.monotonic() > (deadline if self.leave_by is None else min(deadline, self.leave_by))
                if is_late:
                    break
                clock.sleep(timing.wait_poll_s)

    def _moving(self) -> tuple[int, ...]:
        """Returns figures that only an answer of the store, bytes that leave, or the end of an operation change."""
        progress = self.progress()
        return (progress.pid, progress.bytes_done, *(progress.counters.get(name, 0) for name in _MOVING))

    def _say_wait(self, saves: list[str], waited_s: float, left_s: float) -> None:
        progress, where = self.progress(), tier_label(self._config.dirpath)
        what = f"the upload of {names_text(saves)} to {where}" if saves else f"deletes and aliases on {where}"
        say = self._log.warning if progress.last_error else self._log.info
        detail = progress.last_error or progress.upload()
        say("waiting for %s: %.0f s so far, %.0f s more at most; %s", what, waited_s, left_s, detail)

    def _check_drain(self) -> None:
        if self.cannot_import:
            text = "the drain's process can't import what it needs, so nothing is uploaded"
            hint = f"checkpoints stay in node memory, queued; mend the installation: {self.last_words()}"
            raise self._error(text, str(self._tier.root), hint, tier="memory")
        trouble = self.trouble
        if trouble:
            hint = "it goes on by itself as soon as it can; see `ulimit -n`"
            raise self._error(f"the drain can't get at its queue: {trouble}", str(self._tier.root), hint, tier="memory")

    def _stuck_by(self, left: list[Request]) -> Outcome | None:
        """Returns the first failure if all remaining operations have failed, or wait for failed ones."""
        failed = {operation.op_id: outcome for operation in left if (outcome := self._failure(operation.op_id))}
        stuck = failed.keys() | blocked_by_failures(left, failed)
        return next(iter(failed.values())) if failed and all(each.op_id in stuck for each in left) else None

    def _failure(self, op_id: str) -> Outcome | None:
        """Returns the failure of an operation, unless it failed before this process began."""
        outcome = self.queue.outcome(op_id)
        if outcome is None or outcome.state != "failed" or outcome.finished == self._earlier.get(op_id):
            return None
        return outcome

    def _late(self, op_id: str) -> Outcome | None:
        """Returns the failure of a save whose other parts have not come, also an earlier one: a drain notes it once."""
        outcome = self.queue.outcome(op_id)
        is_late = outcome is not None and outcome.state == "failed" and outcome.error_type == "DrainError"
        return outcome if is_late else None

    def _too_slow(self, what: str, timeout_s: float) -> DrainError:
        progress = self.progress()
        hint = f"last error: {progress.last_error or 'none'}; {self.last_words()}"
        is_leaving = self.leave_by is not None and self._clock.monotonic() > self.leave_by
        when = "when this process has to end" if is_leaving else f"after {timeout_s:.0f} s"
        return self._error(f"{what} not durable {when} ({progress.upload()})", self._config.dirpath, hint)

    def _error(self, text: str, key: str, hint: str, *, tier: str = "durable") -> DrainError:
        return DrainError(text, operation="drain", tier=tier, key=key, hint=hint)


def _key(outcome: Outcome) -> tuple[str, str, str]:
    # An operation that is tried again may fail for another reason, which is new.
    return outcome.op_id, outcome.state, outcome.error_type
