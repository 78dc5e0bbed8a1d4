"""Retry, composed around stores and around single requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.base import Content, Metrics, ObjectInfo, Store, UploadJournal

_T = TypeVar("_T")
_log = logging.getLogger("tiered_checkpoint_io.retry")


class Retry:
    """Repeats a call that failed with a retryable :class:`StoreError`.

    Waits grow exponentially, with jitter so that ranks do not return together, up to a deadline;
    then the last error is raised as it is.
    """

    def __init__(self, metrics: Metrics, clock: Clock = SYSTEM) -> None:
        """Takes the counters and the bounds.

        Args:
            metrics: Where each retry is counted, as ``retries``.
            clock: With the deadline, the scale of the first wait, and the longest one. The time of the first attempt
                does not count: sending one part may take long by itself.
        """
        self._metrics = metrics
        self._clock = clock

    def __call__(self, call: Callable[[], _T], *, cancelled: threading.Event | None = None) -> _T:
        """What ``call`` gives.

        Args:
            call: Called at least once.
            cancelled: Once this is set no attempt begins, and a wait for the next one ends: the
                last error is raised.
        """
        event = cancelled or threading.Event()
        failures: list[tuple[float, Exception]] = []

        def attempt() -> _T:
            if failures and event.is_set():
                raise failures[-1][1]
            try:
                return call()
            except Exception as error:
                failures[1:] = [(self._clock.monotonic(), error)]
                raise

        def sleep(seconds: float) -> None:
            self._clock.wait(event, seconds)

        timing = self._clock.timing
        longest = tenacity.wait_exponential(multiplier=timing.retry_first_wait_s, max=timing.retry_max_wait_s)
        retrying = tenacity.Retrying(
            stop=lambda _: event.is_set() or failures[-1][0] - failures[0][0] > timing.retry_deadline_s,
            wait=lambda state: self._clock.rng.uniform(0, longest(state)),
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, StoreError) and error.retryable),
            before_sleep=self._note,
            sleep=sleep,
            reraise=True,
        )
        try:
            return retrying(attempt)
        finally:
            # An error holds the frames that hold this list: what they hold must not wait for the collector.
            failures.clear()

    def _note(self, state: tenacity.RetryCallState) -> None:
        self._metrics.add("retries")
        if state.attempt_number == 1 and state.outcome is not None:
            _log.warning("retrying: %s", state.outcome.exception())


class RetryingStore:
    """A store whose operations are each retried as a whole."""

    def __init__(self, store: Store, clock: Clock = SYSTEM) -> None:
        self._store = store
        self._retry = Retry(store.metrics, clock)

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def metrics(self) -> Metrics:
        return self._store.metrics

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        # A listing that fails half way begins anew: it is handed out once it is whole.
        return iter(self._retry(lambda: [*self._store.list(prefix)]))

    def get(self, key: str) -> bytes:
        return self._retry(lambda: self._store.get(key))

    def put(self, key: str, data: bytes) -> None:
        self._retry(lambda: self._store.put(key, data))

    def size(self, key: str) -> int:
        return self._retry(lambda: self._store.size(key))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._retry(lambda: self._store.read_into(key, offset, buffer))

    def upload(
        self,
        key: str,
        data: Content,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        report = Progress(progress)

        def once() -> None:
            report.restart()
            self._store.upload(key, data, journal=journal, progress=report.add)

        self._retry(once)

    def abandon(self, key: str, journal: UploadJournal) -> None:
        self._retry(lambda: self._store.abandon(key, journal))

    def delete(self, key: str) -> None:
        self._retry(lambda: self._store.delete(key))

    def close(self) -> None:
        self._store.close()


class Progress:
    """Passes progress on without counting twice what an attempt sends again. Thread-safe."""

    def __init__(self, report: Callable[[int], None] | None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._attempt = 0
        self._reported = 0

    def restart(self) -> None:
        """Another attempt begins at byte 0."""
        with self._lock:
            self._attempt = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._attempt += count
            news = self._attempt - self._reported
            self._reported = max(self._reported, self._attempt)
        if news > 0 and self._report is not None:
            self._report(news)
