"""The drain: moves parts from node memory to the durable tier, commits there, and deletes.

One drain a node and namespace, held by a file lock; a process of its own, a thread, or a sidecar. A drain outlives the
trainer, continues the work of a dead drain, and imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.drain.execute import Executor
from tiered_checkpoint_io.engine.drain.operations import next_operation
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.serving import Server
from tiered_checkpoint_io.engine.drain.status import Reporter, shorten_log
from tiered_checkpoint_io.engine.drain.stores import Stores
from tiered_checkpoint_io.engine.replication.replicas import Replicas
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.node import MemoryFullError, is_lost, is_scarcity, make_folders, release, try_lock
from tiered_checkpoint_io.memory.tier import FOLDERS, MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store, open_store, place_of

LOCK_FILE = "drain.lock"
TRAINERS_FILE = "trainers.lock"


def _open_store(config: TieredCheckpointConfig, dirpath: str | None, clock: Clock) -> Store:
    return open_store(config, dirpath, clock=clock)


class Drain:
    """The drain of one memory tier root."""

    def __init__(
        self,
        root: Path,
        *,
        logger: Logger | None = None,
        stop: threading.Event | None = None,
        stay: bool = False,
        for_trainer: bool = False,
        open_store: Callable[[TieredCheckpointConfig, str | None, Clock], Store] = _open_store,
        clock: Clock = SYSTEM,
    ) -> None:
        """Takes a root whose ``drain.json`` says how to reach the durable tier.

        ``stop`` ends the drain after the part in flight, ``stay`` has it wait for further work without a trainer. The
        drain of a trainer leaves when a later trainer asks it to.
        """
        self._root = root
        self._clock = clock
        self._tier = MemoryTier(root, clock=clock)
        self._queue = Queue(root, clock=clock)
        self._log: Logger = logger or logging.getLogger(__name__)
        self._stop = stop or threading.Event()
        self._stay = stay
        self._for_trainer = for_trainer
        self._token = clock.token(16) if for_trainer else ""
        self._stores = Stores(root, open_store, self._log, clock)
        self._report = Reporter(self._queue, self._stores, clock)
        self._executor = Executor(self._tier, self._queue, self._stores, self._report, self._log, self._stop, clock)
        self._replicas = Replicas(root, self._tier, self._log, clock)
        serves = stay or for_trainer
        self._server = Server(root, self._tier, self._log, clock, self._replicas) if serves else None
        self._lock: int | None = None
        self._trainers: int | None = None

    def run(self, *, once: bool = False) -> bool:
        """Works until the queue is empty and no trainer lives; with ``once``, as long as anything can be done now.

        Returns False, without any work, if another drain holds the lock.
        """
        # A process that asks whether a drain runs holds its lock for a moment.
        lock = try_lock(self._root / LOCK_FILE, patience_s=self._clock.timing.drain_lock_s, clock=self._clock)
        if lock is None:
            return False
        self._lock = lock
        try:
            with self._report.beating(self._serve):
                self._loop(once=once)
        finally:
            if self._server is not None:
                self._server.close()
            self._replicas.close()
            self._stores.close()
            release(lock)
            if self._trainers is not None:
                # Only now: a trainer that came meanwhile has waited for this, and finds no drain.
                release(self._trainers)
                self._trainers = None
        return True

    def follows(self) -> bool:
        """Returns whether to wait for the drain that holds the lock: a trainer has asked it to leave."""
        return self._for_trainer and self._queue.is_asked_to_leave(self._queue.announced())

    @property
    def is_replicating(self) -> bool:
        """See :attr:`Replicas.is_busy`."""
        return self._replicas.is_busy

    @property
    def trouble(self) -> str:
        """See :class:`DrainProgress`."""
        return self._report.now.trouble

    # -------------------------------------------------------------------------------- the loop
    def _loop(self, *, once: bool) -> None:
        clock, troubled_at, is_new = self._clock, None, True
        self._report.last_success = clock.monotonic()
        # If this memory was removed, another drain may work on a new one in its place.
        while not (self._stop.is_set() or (self._lock is not None and is_lost(self._lock))):
            try:
                if is_new:
                    self._prepare()
                    is_new = False
                if self._turn(once=once):
                    return
                troubled_at, self._report.now.trouble = None, ""
            except OSError as error:
                # For example, no descriptor is left: a later look may find some. All work that was begun is noted.
                if once or not is_scarcity(error):
                    raise
                if troubled_at is None:
                    self._log.error("cannot look at the queue, trying again: %s", error)
                    troubled_at = clock.monotonic()
                self._report.now.last_error = str(error)
                if clock.monotonic() - troubled_at > clock.timing.drain_trouble_s:
                    self._report.now.trouble = str(error)
                clock.wait(self._stop, clock.timing.drain_rest_s)

    def _prepare(self) -> None:
        """Makes folders and log if they are missing, and says that this drain begins."""
        # A power loss may have left only some folders of a root on a disk.
        make_folders(self._root, FOLDERS, self._log.warning)
        try:
            self._queue.open()
            self._queue.announce(self._token)
        except MemoryFullError as full:
            # Work without a log frees memory.
            self._log.error("outcomes are not noted: %s", full)
        self._executor.begun.alive.found(self._tier.parts(), self._clock)
        with contextlib.suppress(TieredCheckpointError, OSError):
            # Its imports take seconds on a busy node. The first operation reports an error again.
            self._stores.get(place_of(self._stores.config))

    def _serve(self) -> None:
        """Serves this node's memory to other nodes, and stops, if a trainer asks for that; never raises."""
        if self._server is not None:
            self._server.look()
            self._replicas.look()
        with contextlib.suppress(OSError):
            if not self._stop.is_set() and self._queue.is_asked_to_leave(self._token):
                self._log.info("leaving to the drain of a later trainer")
                # Also during a request: its server may be silent.
                self._stop.set()

    def _turn(self, *, once: bool) -> bool:
        """Does the next work; returns True if there is no reason to stay."""
        version = self._queue.version()
        self._serve()
        if self._stop.is_set():
            return True
        with contextlib.suppress(OSError, ConfigError):
            self._tier.use_spill(self._stores.config.spill_dir)
            self._tier.place, self._replicas.keep_last = self._stores.place, self._stores.config.memory_keep_last
        # Operations of the trainer that lives, or was the last, go before those for another durable tier.
        operations = sorted(self._queue.look(self._tier), key=lambda each: each.place != self._tier.place)
        self._report.now.pending = len(operations)
        self._executor.begun.alive.queued(operations)
        self._executor.keep_alive()
        waiting = self._executor.begun.waiting({operation.op_id for operation in operations}, self._clock.monotonic())
        operation = next_operation(operations, waiting.keys() | self._executor.begun.later)
        operation = operation or next_operation(operations, waiting)
        is_idle = operation is None
        if is_idle if once else not self._stay and self._may_leave(is_idle=is_idle):
            return True
        if operation is not None:
            self._executor.execute(operation, operations)
            self._report.write()
            shorten_log(self._root)
        else:
            self._rest(version, min([*waiting.values(), self._clock.monotonic() + self._clock.timing.full_look_s]))
        return False

    def _rest(self, version: bytes, until: float) -> None:
        """Waits for a change of the log, or until something is due; looks by itself now and then all the same."""
        clock = self._clock
        while not self._stop.is_set() and clock.monotonic() < until and self._queue.version() == version:
            clock.wait(self._stop, clock.timing.drain_rest_s)

    def _may_leave(self, *, is_idle: bool) -> bool:
        """Returns True if this drain is to leave; then no trainer can come until it has left."""
        self._trainers = try_lock(self._root / TRAINERS_FILE)
        if self._trainers is None:
            self._report.last_success = self._clock.monotonic()
            return False
        is_over = False
        try:
            # Under the lock: no trainer can add to the queue now.
            is_over = self._is_over(is_idle=is_idle)
        finally:
            if not is_over:
                release(self._trainers)
                self._trainers = None
        return is_over

    def _is_over(self, *, is_idle: bool) -> bool:
        now = self._clock.monotonic()
        # Failing operations may be due in turn for ever.
        overdue = now - self._report.last_success > self._clock.timing.drain_give_up_s
        if not (is_idle or overdue) or self.is_replicating:
            return False
        left = {operation.op_id for operation in self._queue.look(self._tier)}
        # Permanent failures are no reason to stay: the next start may have other credentials than ours.
        begun = [begun for op_id, begun in self._executor.begun.items() if op_id in left]
        # Each part that comes is a success.
        patience_s = self._stores.config.support.wait_timeout_s
        waits = any(each.arrivals is not None and now - each.moved < patience_s for each in begun)
        if left and (waits or not overdue) and not (is_idle and begun and all(each.permanent for each in begun)):
            return False
        if left:
            text = "leaving %d operations for the next start to take up. Last error: %s"
            self._log.error(text, len(left), self._report.now.last_error or "none")
        return True
