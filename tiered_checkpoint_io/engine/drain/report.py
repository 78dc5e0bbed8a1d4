"""What the drain says of itself while it works, several times a second."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue


class Reporter:
    """Collects a drain's figures, and writes them where the trainer reads them."""

    def __init__(self, queue: Queue, requests: Callable[[], Iterable[Mapping[str, int]]], clock: Clock) -> None:
        """Takes the queue to write to, and what gives the counters of all stores."""
        self._queue = queue
        self._clock = clock
        self._requests = requests
        self._lock = threading.Lock()
        self._current: tuple[str, int] = ("", 0)
        self._done = 0
        self._started = 0.0
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
        with self._lock:
            self._current = (name, size)
            self._done, self._started = 0, self._clock.monotonic()
        self.write()
        try:
            yield
        finally:
            with self._lock:
                self._current = ("", 0)

    def add(self, count: int) -> None:
        """Counts bytes that reached the durable tier."""
        with self._lock:
            self._done += count
            self.last_success = self._clock.monotonic()

    def succeeded(self, size: int, seconds: float) -> None:
        """Takes the rate of an operation; ``size`` is 0 for those that upload nothing."""
        with self._lock:
            self.last_success = self._clock.monotonic()
            if size:
                self._rate = size / max(seconds, 1e-9)

    def write(self) -> None:
        """Writes the figures once."""
        counters = Counter(self.counts)
        for requests in self._requests():
            counters.update(requests)
        with self._lock:
            name, total = self._current
            elapsed = self._clock.monotonic() - self._started
            progress = DrainProgress(
                os.getpid(),
                self._clock.wall(),
                self.pending,
                name,
                self._done if name else 0,
                total,
                self._done / max(elapsed, 1e-9) if name else self._rate,
                dict(counters),
                self.last_error,
                self.trouble,
            )
        # Without a log, or a descriptor to open it, there is nothing to say it by.
        with contextlib.suppress(OSError):
            self._queue.write_progress(progress)
