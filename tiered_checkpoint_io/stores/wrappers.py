"""Retry, composed around stores and around single requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.base import Metrics, ObjectInfo, Store, UploadJournal

_T = TypeVar("_T")
_log = logging.getLogger("tiered_checkpoint_io.retry")

DEADLINE_S = 120.0


class Retry:
    """Repeats a call that failed with a retryable :class:`StoreError`.

    Waits grow exponentially, with jitter so that ranks do not return together, up to a deadline;
    then the last error is raised as it is.
    """

    def __init__(
        self, metrics: Metrics, *, deadline_s: float = DEADLINE_S, first_wait_s: float = 0.5, max_wait_s: float = 16.0
    ) -> None:
        """Takes the counters and the bounds.

        Args:
            metrics: Where each retry is counted, as ``retries``.
            deadline_s: A failure later than this after the first one is final, seconds. The time of
                the first attempt is not in it: sending one part may take long by itself.
            first_wait_s: Scale of the first wait, seconds.
            max_wait_s: Longest wait, seconds.
        """
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._wait = tenacity.wait_random_exponential(multiplier=first_wait_s, max=max_wait_s)

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
                failures[1:] = [(time.monotonic(), error)]
                raise

        def sleep(seconds: float) -> None:
            event.wait(seconds)

        retrying = tenacity.Retrying(
            stop=lambda _: event.is_set() or failures[-1][0] - failures[0][0] > self._deadline_s,
            wait=self._wait,
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

    def __init__(self, store: Store, retry: Retry | None = None) -> None:
        self._store = store
        self._retry = retry or Retry(store.metrics)

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
        data: memoryview,
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
