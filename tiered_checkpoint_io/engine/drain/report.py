"""What the drain says of itself while it works, several times a second."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.engine.drain.stores import Stores


class Reporter:
    """Collects a drain's figures, and writes them where the trainer reads them."""

    def __init__(self, queue: Queue, stores: Stores, clock: Clock) -> None:
        """Takes the queue to write to, and the stores whose requests are counted."""
        self._queue = queue
        self._clock = clock
        self._stores = stores
        self._lock = threading.Lock()
        #: Name and bytes of the upload that runs, and when it began.
        self._current = ("", 0, 0.0)
        self._done = 0
        self._rate = 0.0
        self.counts: Counter[str] = Counter()
        self.pending = 0
        self.last_error = ""
        self.trouble = ""
        #: When something last went well, by the monotonic clock.
        self.last_success = clock.monotonic()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Writes the figures again and again, from a thread, while the block runs."""
        ended = threading.Event()

        def beat() -> None:
            timing = self._clock.timing
            while not self._clock.wait(ended, timing.heartbeat_s if self._current[0] else timing.idle_heartbeat_s):
                self.write()

        thread = threading.Thread(target=beat, name="tiered-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.write()

    @contextlib.contextmanager
    def uploading(self, name: str, size: int) -> Iterator[None]:
        """Says that a checkpoint of ``size`` bytes is in work while the block runs."""
        self._current, self._done = (name, size, self._clock.monotonic()), 0
        self.write()
        try:
            yield
        finally:
            self._current = ("", 0, 0.0)

    def add(self, count: int) -> None:
        """Counts bytes that reached the durable tier; for many threads."""
        with self._lock:
            self._done += count
        self.last_success = self._clock.monotonic()

    def succeeded(self, size: int, seconds: float) -> None:
        """Takes the rate of an operation; ``size`` is 0 for those that upload nothing."""
        self.last_success = self._clock.monotonic()
        if size:
            self._rate = size / max(seconds, 1e-9)

    def write(self) -> None:
        """Writes the figures once."""
        counters = Counter(self.counts)
        for store in self._stores.all():
            counters.update(store.metrics.snapshot())
        (name, total, started), done = self._current, self._done
        progress = DrainProgress(
            os.getpid(),
            self._clock.wall(),
            self.pending,
            name,
            done if name else 0,
            total,
            done / max(self._clock.monotonic() - started, 1e-9) if name else self._rate,
            dict(counters),
            self.last_error,
            self.trouble,
        )
        # Without a log, or a descriptor to open it, there is nothing to say it by.
        with contextlib.suppress(OSError):
            self._queue.write_progress(progress)
