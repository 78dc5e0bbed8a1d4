"""What the drain says of itself while it works, several times a second."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.engine.drain.stores import Stores

#: Where the drain's process writes what it logs, below the memory tier's root.
LOG = Path("status", "drain.log")
#: Bytes of it: some five thousand saves. Taken from the memory tier, so no more.
_MAX_LOG = 1 << 20


def shorten_log(root: Path) -> None:
    """Has a log that has grown too long keep its newer half: in place, for its writers append to what they opened."""
    with contextlib.suppress(OSError):
        if (root / LOG).stat().st_size > _MAX_LOG:
            with (root / LOG).open("r+b") as file:
                file.seek(-_MAX_LOG // 2, os.SEEK_END)
                newer = file.read().partition(b"\n")[2]
                file.seek(0)
                file.truncate()
                file.write(newer)


class Reporter:
    """Collects a drain's figures, and writes them where the trainer reads them.

    Attributes:
        now: The figures, as far as they do not change by themselves.
        counts: How many operations ended how.
        last_success: When something last went well, by the monotonic clock.
    """

    def __init__(self, queue: Queue, stores: Stores, clock: Clock) -> None:
        """Takes the queue to write to, and the stores whose requests are counted."""
        self._queue = queue
        self._stores = stores
        self._clock = clock
        self._lock = threading.Lock()
        self._started = 0.0
        self.now = DrainProgress(os.getpid())
        self.counts: Counter[str] = Counter()
        self.last_success = clock.monotonic()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Writes the figures again and again, from a thread, while the block runs."""
        ended = threading.Event()

        def beat() -> None:
            timing = self._clock.timing
            while not self._clock.wait(ended, timing.heartbeat_s if self.now.name else timing.idle_heartbeat_s):
                self.write()

        thread = self._clock.start(beat, "tiered-heartbeat")
        try:
            yield
        finally:
            ended.set()
            self._clock.join(thread, self._clock.timing.log_lock_s)
            self.write()

    @contextlib.contextmanager
    def uploading(self, name: str, size: int) -> Iterator[None]:
        """Says that a checkpoint of ``size`` bytes is in work while the block runs."""
        self._started = self._clock.monotonic()
        self.now = replace(self.now, name=name, bytes_done=0, bytes_total=size)
        self.write()
        try:
            yield
        finally:
            self.now = replace(self.now, name="", bytes_done=0, bytes_total=0)

    def add(self, count: int) -> None:
        """Counts bytes that reached the durable tier; for many threads."""
        with self._lock:
            self.now.bytes_done += count
        self.last_success = self._clock.monotonic()

    def succeeded(self, size: int, seconds: float) -> None:
        """Takes the rate of an operation; ``size`` is 0 for those that upload nothing."""
        self.last_success = self._clock.monotonic()
        if size:
            self.now.rate = size / max(seconds, 1e-9)

    def write(self) -> None:
        """Writes the figures once."""
        counters, error = Counter(self.counts), self.now.last_error
        for store in self._stores.all():
            counters.update(store.metrics.snapshot())
            # What is repeated for minutes has not failed yet.
            error = store.metrics.retrying or error
        now = replace(self.now, heartbeat=self._clock.wall(), counters=dict(counters), last_error=error)
        if now.name:
            now.rate = now.bytes_done / max(self._clock.monotonic() - self._started, 1e-9)
        # Without a log, or a descriptor to open it, there is nothing to say it by.
        with contextlib.suppress(OSError):
            self._queue.write_progress(now)
