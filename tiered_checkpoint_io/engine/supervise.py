"""The trainer's side of the drain: starts it, watches it, and waits for it, within bounds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.engine.drain import CONFIG_FILE, LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.engine.queue import DrainProgress, Outcome, Queue, Request
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.storage.memory import MemoryTier, write_atomic

_POLL_S = 0.02
_LOCK_WAIT_S = 30.0
_RESPAWN_WAIT_S = 1.0
_MAX_RESPAWN_WAIT_S = 30.0


class DrainHandle:
    """One process' connection to the drain of its node."""

    def __init__(self, tier: MemoryTier, config: TieredCheckpointConfig, logger: Logger) -> None:
        self._tier = tier
        self._root = tier.root
        self._config = config
        self._log = logger
        self.queue = Queue(tier.root)
        self._pid = os.getpid()
        self._trainer_lock: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._spawned_at = 0.0
        self._respawn_wait = _RESPAWN_WAIT_S
        self._seen = {(outcome.op_id, outcome.state) for outcome in self.queue.outcomes()}

    # ----------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Announces this trainer, and makes sure that a drain runs."""
        if self._foreign():
            return
        if self._trainer_lock is None:
            self._trainer_lock = _shared_lock(self._root / TRAINERS_FILE)
            text = self._config.to_json().encode()
            path = self._root / CONFIG_FILE
            if not path.exists() or path.read_bytes() != text:
                write_atomic(path, text)
        self.ensure()

    def ensure(self) -> None:
        """Starts a drain where none runs; one that dies again and again is started ever more rarely."""
        if self._foreign() or self._running():
            return
        now = time.monotonic()
        if self._spawned_at and now - self._spawned_at < self._respawn_wait:
            return
        if self._spawned_at:
            self._respawn_wait = min(_MAX_RESPAWN_WAIT_S, self._respawn_wait * 2)
            self._log.warning("the drain is not running; starting it again")
        self._spawned_at = now
        if self._config.drain == "thread":
            self._stop = threading.Event()
            drain = Drain(self._root, logger=self._log, stop=self._stop, stay=True)
            self._thread = threading.Thread(target=drain.run, name="tiered-drain", daemon=True)
            self._thread.start()
            return
        with open(self._root / "status" / "drain.log", "ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tiered_checkpoint_io", "drain", "--root", str(self._root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Launchers kill the process group of their workers; the drain has work to finish.
                start_new_session=True,
                cwd="/",
            )

    def close(self, *, timeout_s: float) -> None:
        """Leaves the drain to itself. A thread ends after its queue is empty, or at the timeout."""
        if self._foreign():
            return
        if self._thread is not None:
            with contextlib.suppress(DrainError):
                self.flush(timeout_s)
            self._stop.set()
            self._thread.join(timeout_s)
            self._thread = None
        if self._trainer_lock is not None:
            os.close(self._trainer_lock)
            self._trainer_lock = None
        if self._child is not None:
            # Reaps a drain that has left; one that still works is adopted by init when we end.
            if self._child.poll() is None and not self.pending():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(2.0)
            if self._child.poll() is None:
                self._child.returncode = 0
            self._child = None
        self._spawned_at = 0.0

    # ----------------------------------------------------------------------------------- work
    def submit(self, request: Request) -> None:
        """Queues an alias, delete or cancel."""
        if not self._foreign():
            self.queue.submit(request)
            self.start()

    def pending(self) -> list[str]:
        """Ids of all that waits for the drain, in order."""
        saves = [stored.save_id for stored in self._tier.parts() if stored.pending]
        return sorted([*saves, *(request.op_id for request in self.queue.requests())])

    def pending_saves(self) -> list[str]:
        """Ids of the saves that wait for the drain, in order."""
        return [stored.save_id for stored in self._tier.parts() if stored.pending]

    def has_room(self, cancel_id: str) -> bool:
        """Whether one more save may be queued, by ``max_pending`` and ``on_pending``.

        Waits, where so configured, while the drain gets on. A drain that fails is not waited for:
        its oldest failed save is cancelled in favour of the new one, so that training goes on and
        the queue stays bounded.
        """
        deadline = time.monotonic() + self._config.wait_timeout_s
        warned = False
        while len(self.pending_saves()) >= self._config.max_pending:
            self.ensure()
            failed = [op_id for op_id in self.pending_saves() if self._has_failed(op_id)]
            if failed:
                self._log.error("the durable tier fails; giving up an older save: %s", self.progress().last_error)
                self.queue.submit(Request(cancel_id, "cancel", "cancel", self._config.dirpath, failed[0]))
                return True
            if self._config.on_pending == "skip":
                return False
            if not warned:
                self._log.warning("waiting: %d saves are on their way to the durable tier", len(self.pending_saves()))
                warned = True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait(self, op_id: str, timeout_s: float) -> Outcome:
        """The outcome of an operation: its commit, or its first failure.

        Raises:
            DrainError: It had none within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            outcome = self.queue.outcome(op_id)
            if outcome is not None:
                self._seen.add((op_id, outcome.state))
                return outcome
            self.ensure()
            if time.monotonic() > deadline:
                raise self._too_slow(f"operation {op_id}", timeout_s)
            time.sleep(_POLL_S)

    def flush(self, timeout_s: float) -> None:
        """Waits until nothing is queued.

        Raises:
            DrainError: Something still was after ``timeout_s`` seconds, or fails.
        """
        deadline = time.monotonic() + timeout_s
        while left := self.pending():
            self.ensure()
            failed = [outcome for op_id in left if (outcome := self.queue.outcome(op_id)) and outcome.state == "failed"]
            if failed and len(failed) == len(left):
                raise DrainError(
                    f"{len(left)} operations did not reach the durable tier: {failed[0].error}",
                    operation="drain",
                    tier="durable",
                    key=failed[0].name,
                    hint="they stay in node memory and are tried again",
                )
            if time.monotonic() > deadline:
                raise self._too_slow(f"{len(left)} operations", timeout_s)
            time.sleep(_POLL_S)

    def new_outcomes(self) -> list[Outcome]:
        """Outcomes that were not yet given to anybody here."""
        fresh = [outcome for outcome in self.queue.outcomes() if (outcome.op_id, outcome.state) not in self._seen]
        self._seen.update((outcome.op_id, outcome.state) for outcome in fresh)
        return fresh

    def progress(self) -> DrainProgress:
        """What the drain last said of itself."""
        return self.queue.progress()

    # ---------------------------------------------------------------------------------- inside
    def _has_failed(self, op_id: str) -> bool:
        outcome = self.queue.outcome(op_id)
        return outcome is not None and outcome.state == "failed"

    def _too_slow(self, what: str, timeout_s: float) -> DrainError:
        progress = self.progress()
        return DrainError(
            f"{what} not durable after {timeout_s:.0f} s"
            f" ({progress.bytes_done} of {progress.bytes_total} bytes of {progress.name or 'nothing'})",
            operation="drain",
            tier="durable",
            key=self._config.dirpath,
            hint=f"see {self._root}/status/drain.log; last error: {progress.last_error or 'none'}",
        )

    def _running(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._child is not None and self._child.poll() is None:
            return True
        descriptor = os.open(self._root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _foreign(self) -> bool:
        # A forked child (a DataLoader's worker) has our memory, but not our role.
        return os.getpid() != self._pid


def _shared_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise DrainError(
                    "a drain that should have left holds the trainers' lock",
                    operation="start",
                    tier="memory",
                    key=str(path),
                ) from None
            time.sleep(_POLL_S)
        else:
            return descriptor
