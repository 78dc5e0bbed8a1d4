"""The drain: moves parts from node memory to the durable tier, commits there, and deletes.

One drain a node and namespace, held by a file lock; a process of its own, a thread, or a sidecar.
It outlives the trainer, takes up what a dead drain left, and imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tiered_checkpoint_io.engine.drain.gathering import Fate, Gathering
from tiered_checkpoint_io.engine.drain.ledger import Ledger, passes
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.operations import (
    SAVES,
    Request,
    held_back,
    in_order,
    next_operation,
    superseded,
)
from tiered_checkpoint_io.engine.drain.queue import FileJournal, Queue
from tiered_checkpoint_io.engine.drain.report import Reporter
from tiered_checkpoint_io.engine.drain.stores import Stores
from tiered_checkpoint_io.engine.durable import commit, commit_sharded
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ManifestError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, rate
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store, open_store

LOCK_FILE = "drain.lock"
TRAINERS_FILE = "trainers.lock"
_JOURNAL = "upload.json"
_POLL_S = 0.05
_IDLE_POLL_S = 0.2
_GIVE_UP_S = 900.0
#: What keeps it from its work for longer is told to who waits.
_TROUBLE_S = 3.0
#: Whoever asks whether a drain runs holds its lock for a moment.
_LOCK_PATIENCE_S = 0.1


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
        self._stores = Stores(root, open_store, self._log)
        self._gathering = Gathering(self._log)
        self._journals: dict[str, FileJournal] = {}
        self._seen: set[str] = set()
        self._trainers: int | None = None
        self._report = Reporter(self._queue, self._stores.counters)
        self._ledger = Ledger(self._queue, self._tier, self._report, self._log)

    def run(self, *, once: bool = False) -> bool:
        """Works until there is nothing to do and nobody who could give more.

        Args:
            once: Return as soon as nothing is left that could be done now.

        Returns:
            False where another drain holds the lock, and nothing was done.
        """
        lock = try_lock(self._root / LOCK_FILE, patience_s=_LOCK_PATIENCE_S)
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

    # -------------------------------------------------------------------------------- the loop
    def _loop(self, *, once: bool) -> None:
        self._report.last_success = time.monotonic()
        self._queue.spares.fill()
        while not self._stop.is_set():
            try:
                if self._turn(once=once):
                    return
            except OSError as error:
                # Out of descriptors, for one: the next look may find some. Nothing was begun that is not noted.
                if once or not passes(error):
                    raise
                if self._ledger.troubled_at is None:
                    self._log.error("cannot look at the queue, trying again: %s", error)
                    self._ledger.troubled_at = time.monotonic()
                self._report.last_error = str(error)
                self._stop.wait(_IDLE_POLL_S)
            else:
                if not self._report.untold:
                    self._ledger.troubled_at = None

    @property
    def trouble(self) -> str:
        """Why nothing could be done for a while; empty where something could."""
        since = self._ledger.troubled_at
        return self._report.last_error if since is not None and time.monotonic() - since > _TROUBLE_S else ""

    def _turn(self, *, once: bool) -> bool:
        """Does what can be done next; whether there is nothing more to stay for."""
        self._refuse_unreadable()
        operations, parts = self.pending()
        self._report.pending = len(operations)
        self._look_again(operations)
        op_ids = {operation.op_id for operation in operations}
        self._gathering.keep(op_ids)
        self._ledger.keep(op_ids)
        self._journals = {op_id: journal for op_id, journal in self._journals.items() if op_id in op_ids}
        now = time.monotonic()
        waiting = self._ledger.not_due(now)
        waiting = (waiting - self._gathering.complete()) | self._gathering.not_due(now)
        operation = next_operation(operations, waiting, self._ledger.without_successor())
        if operation is not None:
            self._execute(operation, operations, parts)
        elif once or (not self._stay and self._may_leave()):
            return True
        else:
            # A save that went past the queue may have set deletes free.
            self._ledger.look_again()
            self._stop.wait(_POLL_S if operations else _IDLE_POLL_S)
        return False

    def pending(self) -> tuple[list[Request], dict[str, StoredPart]]:
        """All operations in order, and the parts of those that are saves, by their ids."""
        parts: dict[str, StoredPart] = {}
        saves = []
        # A trainer may add to both while we look. What is asked for behind a save must not be taken up
        # without it: an alias would find no target, and be given up.
        seen = {request.op_id for request in self._queue.requests()}
        for stored in self._tier.parts():
            if stored.pending:
                part = stored.part
                parts[stored.op_id] = stored
                saves.append(Request(stored.op_id, "save" if part.commits else "part", part.name, part.dirpath))
        newest = max(parts, default="")
        requests = [each for each in self._queue.requests() if each.op_id in seen or each.op_id < newest]
        return in_order([*saves, *requests]), parts

    def _refuse_unreadable(self) -> None:
        for op_id in self._queue.unreadable():
            error = ManifestError("the request can't be understood", operation="drain", tier="memory", key=op_id)
            self._log.error("%s", error)
            self._report.counts["failed"] += 1
            request = Request(op_id, "unknown", op_id, "")
            self._ledger.finish(request, -1, "failed", error=error)

    def _look_again(self, operations: list[Request]) -> None:
        """What only a person can mend is tried again when there is something new to do."""
        fresh = {operation.op_id for operation in operations} - self._seen
        if fresh:
            self._seen = {operation.op_id for operation in operations}
            self._ledger.retry_now()

    def _may_leave(self) -> bool:
        trainers = try_lock(self._root / TRAINERS_FILE)
        if trainers is None:
            self._report.last_success = time.monotonic()
            return False
        # Looked at under the lock: no trainer can add to it now.
        operations, _ = self.pending()
        held = held_back(operations, self._ledger.without_successor())
        left = [operation for operation in operations if operation not in held]
        overdue = time.monotonic() - self._report.last_success > self._give_up_s
        if left and not overdue and not self._only_a_person_can_mend(left):
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

    def _only_a_person_can_mend(self, operations: list[Request]) -> bool:
        """Whether to stay would be in vain: the next start may bring other credentials than ours."""
        in_vain = self._ledger.only_a_person_can_mend(operation.op_id for operation in operations)
        return in_vain and not self._gathering.hopeful()

    # ------------------------------------------------------------------------------ operations
    def _execute(self, operation: Request, operations: list[Request], parts: dict[str, StoredPart]) -> None:
        started = time.monotonic()
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
                    self._give_up(operation, parts, "a later save has taken its name")
                if fate != "done":
                    return
            else:
                store = self._stores.get(operation.dirpath)
                journal = self._queue.journal(operation.op_id)
                if operation.action == "alias":
                    commit.put_alias(store, operation.name, operation.target, before=operation.op_id, journal=journal)
                else:
                    commit.delete(store, operation.name, before=operation.op_id, journal=journal)
        except _Stopped:
            return
        except Exception as error:
            # Whatever it is, it is this operation's: the drain has others to carry out.
            self._failed(operation, stored, step, error, started)
            return
        seconds = time.monotonic() - started
        self._report.succeeded(size, seconds, "uploaded" if operation.action == "part" else "committed")
        self._ledger.finish(operation, step, "committed", size=size, seconds=seconds)
        if stored is not None:
            # Before it leaves the queue: who waits for all that is queued must not find just those that failed.
            for old in superseded(operations, {*self._ledger.tried, *self._gathering.overtaken()}, operation):
                self._give_up(old, parts, f"superseded by {operation.name}")
            # Behind the outcome: a drain that dies in between finds it committed, and says so again.
            self._ledger.mark_drained(stored)
            what = (
                "is durable" if stored.part.commits else f"has its part of rank {stored.part.rank} on the durable tier"
            )
            self._log.info("Step %d: %s %s: %s", step, operation.name, what, rate(size, seconds))
            self._queue.prune()

    def _save(self, stored: StoredPart) -> Fate:
        part = stored.part
        store = self._stores.get(part.dirpath)
        journal = self._journal(stored)
        with self._report.uploading(part.name, part.content.size), self._tier.reading(stored) as views:
            if part.content.kind == "full":
                data = next(iter(views.values()), memoryview(b""))
                written = commit.commit_full(store, part, data, journal=journal, progress=self._progress)
                return "replaced" if written == "replaced" else "done"
            return self._gathering.drain(
                store,
                part,
                views,
                journal=journal,
                progress=self._progress,
                timeout_s=self._stores.config.wait_timeout_s,
                busy=lambda: self._names_behind(part.save_id),
            )

    def _journal(self, stored: StoredPart) -> FileJournal:
        path = stored.folder / _JOURNAL
        return self._journals.setdefault(stored.op_id, FileJournal(path, self._queue.spares))

    def _names_behind(self, save_id: str) -> set[str]:
        """Names of saves that were made after one, and are on their way."""
        operations, _ = self.pending()
        return {each.name for each in operations if each.action in SAVES and ids.save_id_of_op(each.op_id) > save_id}

    def _progress(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._report.add(count)

    def _cancel(self, operation: Request, operations: list[Request], parts: dict[str, StoredPart]) -> None:
        for other in operations:
            if other.action in SAVES and ids.save_id_of_op(other.op_id) == ids.save_id_of_op(operation.target):
                self._give_up(other, parts, "cancelled to keep the queue bounded")

    def _give_up(self, operation: Request, parts: dict[str, StoredPart], reason: str) -> None:
        stored = parts[operation.op_id]
        journal = self._journal(stored)
        if journal.read() is not None and operation.op_id not in self._ledger.tried:
            # What cannot be abandoned now is found by the next look for stale uploads.
            with contextlib.suppress(TieredCheckpointError):
                abandon = commit.abandon if stored.part.content.kind == "full" else commit_sharded.abandon
                abandon(self._stores.get(operation.dirpath), stored.part, journal)
        self._gathering.forget(operation.op_id)
        self._report.counts["skipped"] += 1
        self._log.warning("%s will not be durable: %s", operation.name, reason)
        self._ledger.finish(operation, stored.part.content.step, "skipped", error=reason)
        self._ledger.mark_drained(stored)

    def _failed(
        self, operation: Request, stored: StoredPart | None, step: int, error: Exception, started: float
    ) -> None:
        self._report.last_error = str(error)
        if isinstance(error, CorruptCheckpointError) and stored is not None:
            where = self._tier.quarantine(stored.folder, str(error))
            self._log.error("%s is corrupt in memory and was moved to %s: %s", operation.name, where, error)
            self._report.counts["failed"] += 1
            self._ledger.finish(operation, step, "failed", error=error)
            return
        if isinstance(error, CheckpointNotFoundError):
            # A save that was removed from memory, or an alias whose target was given up: then the
            # old alias still names what is good.
            self._log.warning("%s", error)
            self._report.counts["skipped"] += 1
            self._ledger.finish(operation, step, "skipped", error=error)
            return
        self._report.counts["failed"] += 1
        self._ledger.retry_later(operation, step, error, seconds=time.monotonic() - started)
