"""The drain: moves parts from node memory to the durable tier, commits there, and deletes.

One drain a node and namespace, held by a file lock; a process of its own, a thread, or a sidecar.
It outlives the trainer, takes up what a dead drain left, and imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.engine import commit
from tiered_checkpoint_io.engine.queue import (
    DrainProgress,
    FileJournal,
    Outcome,
    Queue,
    Request,
    State,
    next_operation,
    superseded,
)
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, rate
from tiered_checkpoint_io.storage import Store, open_store
from tiered_checkpoint_io.storage.memory import MemoryTier, StoredPart

CONFIG_FILE = "drain.json"
LOCK_FILE = "drain.lock"
TRAINERS_FILE = "trainers.lock"
_POLL_S = 0.05
_IDLE_POLL_S = 0.2
_HEARTBEAT_S = 0.25
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0
#: What only a person can mend is looked at again this often.
_PERMANENT_BACKOFF_S = 60.0
_GIVE_UP_S = 900.0


class _Stopped(Exception):  # noqa: N818 - not an error: the way out of an upload when told to stop
    pass


@dataclass(slots=True)
class _Retry:
    attempts: int
    due: float


def try_lock(path: Path) -> int | None:
    """Takes an exclusive lock on a file; the descriptor that holds it, or None if another does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class Drain:
    """The drain of one memory tier root."""

    def __init__(
        self,
        root: Path,
        *,
        logger: Logger | None = None,
        stop: threading.Event | None = None,
        stay: bool = False,
        give_up_s: float = _GIVE_UP_S,
        open_store: Callable[[TieredCheckpointConfig, str | None], Store] = open_store,
    ) -> None:
        """Takes a root whose ``drain.json`` says how to reach the durable tier.

        Args:
            root: ``<memory_dir>/tiered-<uid>/<namespace>``.
            logger: Where to log.
            stop: Set from elsewhere to end the drain after the part in flight.
            stay: Whether to wait for further work when no trainer lives.
            give_up_s: After the last trainer's death, how long to try without any success, seconds.
            open_store: Makes the store for a dirpath.
        """
        self._root = root
        self._tier = MemoryTier(root)
        self._queue = Queue(root)
        self._log: Logger = logger or logging.getLogger(__name__)
        self._stop = stop or threading.Event()
        self._stay = stay
        self._give_up_s = give_up_s
        self._open_store = open_store
        self._stores: dict[str, Store] = {}
        self._config_stamp = 0
        self._config: TieredCheckpointConfig | None = None
        self._retries: dict[str, _Retry] = {}
        self._counts: Counter[str] = Counter()
        self._last_error = ""
        self._last_success = time.monotonic()
        self._current: tuple[str, int] = ("", 0)
        self._done = 0
        self._started = 0.0
        self._rate = 0.0
        self._pending = 0
        self._lock = threading.Lock()

    def run(self, *, once: bool = False) -> bool:
        """Works until there is nothing to do and nobody who could give more.

        Args:
            once: Return as soon as nothing is left that could be done now.

        Returns:
            False where another drain holds the lock, and nothing was done.
        """
        lock = try_lock(self._root / LOCK_FILE)
        if lock is None:
            return False
        beat = threading.Thread(target=self._heartbeat, name="tiered-heartbeat", daemon=True)
        ended = self._ended = threading.Event()
        beat.start()
        try:
            self._loop(once=once)
        finally:
            ended.set()
            beat.join()
            self._report()
            for store in self._stores.values():
                store.close()
            os.close(lock)
        return True

    # -------------------------------------------------------------------------------- the loop
    def _loop(self, *, once: bool) -> None:
        self._last_success = time.monotonic()
        while not self._stop.is_set():
            operations, parts = self.pending()
            self._pending = len(operations)
            now = time.monotonic()
            waiting = {op_id for op_id, retry in self._retries.items() if retry.due > now}
            operation = next_operation(operations, waiting)
            if operation is not None:
                self._execute(operation, operations, parts)
                continue
            if once or (not self._stay and self._may_leave(operations)):
                return
            self._stop.wait(_POLL_S if operations else _IDLE_POLL_S)

    def pending(self) -> tuple[list[Request], dict[str, StoredPart]]:
        """All operations in order, and the parts of those that are saves."""
        parts = {stored.save_id: stored for stored in self._tier.parts() if stored.pending}
        saves = [Request(save_id, "save", stored.part.name, stored.part.dirpath) for save_id, stored in parts.items()]
        return sorted([*saves, *self._queue.requests()], key=lambda request: request.op_id), parts

    def _may_leave(self, operations: list[Request]) -> bool:
        trainers = try_lock(self._root / TRAINERS_FILE)
        if trainers is None:
            self._last_success = time.monotonic() if not operations else self._last_success
            return False
        try:
            if not operations:
                # A trainer that comes now waits for its lock until we are gone, and starts anew.
                operations, _ = self.pending()
                return not operations
            if time.monotonic() - self._last_success > self._give_up_s:
                self._log.error(
                    "giving up with %d operations left; they are taken up by the next start. Last error: %s",
                    len(operations),
                    self._last_error,
                )
                return True
            return False
        finally:
            os.close(trainers)

    # ------------------------------------------------------------------------------ operations
    def _execute(self, operation: Request, operations: list[Request], parts: dict[str, StoredPart]) -> None:
        started = time.monotonic()
        stored = parts.get(operation.op_id)
        step = stored.part.content.step if stored else -1
        size = stored.part.content.size if stored else 0
        try:
            state: State = "committed"
            if operation.action == "cancel":
                self._cancel(operation, operations, parts)
            elif operation.action == "save":
                assert stored is not None
                self._save(stored)
            else:
                store = self._store(operation.dirpath)
                if operation.action == "alias":
                    commit.put_alias(store, operation.name, operation.target)
                else:
                    journal = self._queue.journal(operation.op_id)
                    commit.delete(store, operation.name, before=operation.op_id, journal=journal)
        except _Stopped:
            return
        except (TieredCheckpointError, OSError) as error:
            self._failed(operation, stored, step, error, started)
            return
        seconds = time.monotonic() - started
        self._retries.pop(operation.op_id, None)
        self._last_success = time.monotonic()
        self._counts[state] += 1
        self._finish(operation, step, state, size=size, seconds=seconds)
        if operation.action == "save" and stored is not None:
            self._rate = size / max(seconds, 1e-9)
            self._log.info("Step %d: %s is durable: %s", step, operation.name, rate(size, seconds))
            for old in superseded(operations, self._retries, operation):
                self._give_up(old, parts, f"superseded by {operation.name}")
            self._queue.prune()

    def _save(self, stored: StoredPart) -> None:
        store = self._store(stored.part.dirpath)
        with self._lock:
            self._current = (stored.part.name, stored.part.content.size)
            self._done, self._started = 0, time.monotonic()
        self._report()
        try:
            with self._tier.reading(stored) as views:
                (data,) = views.values()
                journal = FileJournal(stored.folder / "upload.json")
                commit.commit_full(store, stored.part, data, journal=journal, progress=self._progress)
        except CheckpointNotFoundError:
            # Someone removed it from memory: there is nothing left to upload.
            return
        finally:
            with self._lock:
                self._current = ("", 0)
        self._tier.mark_drained(stored)

    def _progress(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        with self._lock:
            self._done += count

    def _cancel(self, operation: Request, operations: list[Request], parts: dict[str, StoredPart]) -> None:
        for other in operations:
            if other.op_id == operation.target and other.action == "save":
                self._give_up(other, parts, "cancelled to keep the queue bounded")

    def _give_up(self, operation: Request, parts: dict[str, StoredPart], reason: str) -> None:
        stored = parts[operation.op_id]
        journal = FileJournal(stored.folder / "upload.json")
        if journal.read() is not None:
            # What cannot be abandoned now is found by the next look for stale uploads.
            with contextlib.suppress(StoreError):
                self._store(operation.dirpath).abandon(operation.name, journal)
        self._tier.mark_drained(stored)
        self._retries.pop(operation.op_id, None)
        self._counts["skipped"] += 1
        self._log.warning("%s will not be durable: %s", operation.name, reason)
        self._finish(operation, stored.part.content.step, "skipped", error=reason)

    def _failed(
        self, operation: Request, stored: StoredPart | None, step: int, error: Exception, started: float
    ) -> None:
        self._counts["failed"] += 1
        self._last_error = str(error)
        if isinstance(error, CorruptCheckpointError) and stored is not None:
            where = self._tier.quarantine(stored.folder, str(error))
            self._log.error("%s is corrupt in memory and was moved to %s: %s", operation.name, where, error)
            self._finish(operation, step, "skipped", error=str(error), error_type=type(error).__name__)
            return
        if isinstance(error, CheckpointNotFoundError) and operation.action == "alias":
            # Its target was given up; the old alias still names what is good.
            self._log.warning("%s", error)
            self._finish(operation, step, "skipped", error=str(error), error_type=type(error).__name__)
            return
        attempts = self._retries[operation.op_id].attempts + 1 if operation.op_id in self._retries else 1
        retryable = isinstance(error, TieredCheckpointError) and error.retryable
        backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (attempts - 1)) if retryable else _PERMANENT_BACKOFF_S
        self._retries[operation.op_id] = _Retry(attempts, time.monotonic() + backoff)
        if attempts == 1:
            self._log.error("%s of %s failed, to be tried again: %s", operation.action, operation.name, error)
        self._finish(
            operation,
            step,
            "failed",
            final=False,
            error=str(error),
            error_type=type(error).__name__,
            seconds=time.monotonic() - started,
        )

    def _finish(
        self,
        operation: Request,
        step: int,
        state: State,
        *,
        final: bool = True,
        error: str = "",
        error_type: str = "",
        size: int = 0,
        seconds: float = 0.0,
    ) -> None:
        outcome = Outcome(
            operation.op_id,
            operation.action,
            operation.name,
            step,
            state,
            error,
            error_type,
            size,
            seconds,
            time.time(),
        )
        self._queue.finish(outcome, final=final)

    # ------------------------------------------------------------------------------- surroundings
    def _store(self, dirpath: str) -> Store:
        path = self._root / CONFIG_FILE
        stamp = path.stat().st_mtime_ns
        if self._config is None or stamp != self._config_stamp:
            for store in self._stores.values():
                store.close()
            self._stores.clear()
            self._config = TieredCheckpointConfig.from_json(path.read_text())
            self._config_stamp = stamp
        if dirpath not in self._stores:
            store = self._open_store(self._config, dirpath)
            self._stores[dirpath] = store
            abort_stale = getattr(store, "abort_stale_uploads", None)
            if abort_stale is not None:
                # A server without this request keeps its own rubbish; the upload matters more.
                with contextlib.suppress(StoreError):
                    abort_stale()
        return self._stores[dirpath]

    def _heartbeat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            self._report()

    def _report(self) -> None:
        counters = Counter(self._counts)
        for store in list(self._stores.values()):
            counters.update(store.metrics.snapshot())
        with self._lock:
            name, total = self._current
            elapsed = time.monotonic() - self._started
            speed = self._done / max(elapsed, 1e-9) if name else self._rate
            progress = DrainProgress(
                os.getpid(),
                time.time(),
                self._pending,
                name,
                self._done if name else 0,
                total,
                speed,
                dict(counters),
                self._last_error,
            )
        # A full tmpfs must not end the drain that frees it.
        with contextlib.suppress(OSError):
            self._queue.write_progress(progress)
