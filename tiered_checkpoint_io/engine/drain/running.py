"""Has a drain run on this node while a process trains: a process of its own, or a thread."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.locks import is_locked, is_lost, release, share, try_lock
from tiered_checkpoint_io.engine.drain.process import CANNOT_IMPORT, reap, start_process
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.report import LOG
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.logs import DebugOnly, Logger
from tiered_checkpoint_io.memory.private import write_atomic, write_over
from tiered_checkpoint_io.memory.space import MemoryFullError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


class DrainRunner:
    """The drain of a node, as one trainer starts and leaves it."""

    def __init__(self, root: Path, queue: Queue, config: TieredCheckpointConfig, logger: Logger, clock: Clock) -> None:
        self._root, self._queue = root, queue
        self._config = config
        self._log = logger
        self._clock = clock
        self._pid = os.getpid()
        self._trainer_lock: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._drain: Drain | None = None
        self._stop = threading.Event()
        self._spawned_at, self._respawn_wait = 0.0, clock.timing.respawn_s

    # ----------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Announces this trainer, and makes sure that a drain runs.

        Raises:
            MemoryFullError: There is no space for the little that it needs.
        """
        if self.is_foreign:
            return
        reap()
        if self._trainer_lock is not None and is_lost(self._trainer_lock):
            # Somebody removed this memory beside us: the drain needs all of it anew.
            release(self._trainer_lock)
            self._trainer_lock = None
        if self._trainer_lock is None:
            self._queue.open()
            self._write_config()
            if self._join() and self._config.support.drain == "process":
                self._follow(self._queue.announced())
        self.ensure()

    def _join(self) -> bool:
        """Takes the trainers' lock; returns whether no other trainer of this node has it.

        Raises:
            DrainError: A drain holds it that should have ended.
        """
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
            # If there is no space to ask, that drain goes on.
            with contextlib.suppress(MemoryFullError):
                self._queue.ask_to_leave(token)
            self._spawn()

    def _write_config(self) -> None:
        path, text = self._root / CONFIG_FILE, self._config.to_json().encode()
        if not path.exists() or path.read_bytes() != text:
            try:
                write_atomic(path, text)
            except MemoryFullError:
                if not path.exists():
                    raise
                # It has a page of its own.
                write_over(path, text)

    def ensure(self) -> None:
        """Starts a drain where none runs; one that dies again and again is started ever more rarely."""
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
            # What it says is said of its outcomes, whether it is a thread or a process.
            quiet = DebugOnly(self._log, {})
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

    def leave(self, timeout_s: float, is_idle: Callable[[], bool]) -> None:
        """Leaves the drain to itself; a thread is stopped.

        Args:
            timeout_s: For how long to wait for the end of a thread, seconds.
            is_idle: Whether there is nothing that a process could do: then it ends as well, and is waited for.
        """
        if self._thread is not None:
            self._stop.set()
            self._clock.join(self._thread, timeout_s)
            self._thread = self._drain = None
        if self._trainer_lock is not None:
            release(self._trainer_lock)
            self._trainer_lock = None
            self._queue.ring()
        if self._child is not None:
            # Reaps a drain that has left; one that still works is adopted by init when we end. The next trainer must
            # not meet one while it ends.
            if self._child.poll() is None and is_idle():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(self._clock.timing.reap_s)
            self._child = None
        self._spawned_at = 0.0

    # ----------------------------------------------------------------------------------- state
    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child (a DataLoader's worker): it has our memory, but not our role."""
        return os.getpid() != self._pid

    @property
    def is_announced(self) -> bool:
        """Whether the drain knows of this trainer."""
        return self._trainer_lock is not None

    @property
    def is_thread(self) -> bool:
        """Whether it is, or was, a thread of this process."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether a drain runs, of this process or another."""
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._child is not None and self._child.poll() is None:
            return True
        return is_locked(self._root / LOCK_FILE)

    @property
    def has_worked(self) -> bool:
        """Whether a drain was ever started over this memory, by this process or an earlier one."""
        return (self._root / CONFIG_FILE).exists()

    @property
    def trouble(self) -> str:
        """See :attr:`DrainProgress.trouble`."""
        return self._drain.trouble if self._drain is not None else self._queue.progress().trouble

    @property
    def cannot_import(self) -> bool:
        """Whether there is no drain because the last one that was started here can't import what it needs."""
        return self._child is not None and self._child.poll() == CANNOT_IMPORT and not self.is_running

    def last_words(self) -> str:
        """Where the drain's log is, and its last line."""
        path, last = self._root / LOG, ""
        with contextlib.suppress(OSError):
            last = path.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"{path} ends with: {last}" if last else f"see {path}"
