"""Retry, composed around stores and around single requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.storage.base import Metrics, ObjectInfo, Store, UploadJournal

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
            deadline_s: No attempt begins later than this after the first, seconds.
            first_wait_s: Scale of the first wait, seconds.
            max_wait_s: Longest wait, seconds.
        """
        self._metrics = metrics
        self._stop = tenacity.stop_after_delay(deadline_s)
        self._wait = tenacity.wait_random_exponential(multiplier=first_wait_s, max=max_wait_s)

    def __call__(self, call: Callable[[], _T]) -> _T:
        retrying = tenacity.Retrying(
            stop=self._stop,
            wait=self._wait,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, StoreError) and error.retryable),
            before_sleep=self._note,
            reraise=True,
        )
        return retrying(call)

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
        self._retry(lambda: self._store.upload(key, data, journal=journal, progress=progress))

    def abandon(self, key: str, journal: UploadJournal) -> None:
        self._retry(lambda: self._store.abandon(key, journal))

    def delete(self, key: str) -> None:
        self._retry(lambda: self._store.delete(key))

    def close(self) -> None:
        self._store.close()
