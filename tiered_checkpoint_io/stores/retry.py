"""Retry: how requests are repeated, and how an upload then reports progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.base import Metrics
from tiered_checkpoint_io.stores.silence import current_question

_T = TypeVar("_T")
_log = logging.getLogger("tiered_checkpoint_io.retry")


class Retry:
    """Repeats a call that failed with a retryable :class:`StoreError`.

    Waits grow exponentially, with jitter so that ranks do not return together, up to a deadline; then the last error
    is raised as it is. The time of the first attempt does not count: sending one part may take long by itself.
    """

    def __init__(self, metrics: Metrics, clock: Clock = SYSTEM) -> None:
        self._metrics = metrics
        self._clock = clock

    def __call__(self, call: Callable[[], _T], *, cancelled: threading.Event | None = None) -> _T:
        """Returns the result of ``call``; once ``cancelled`` is set, begins no further attempt and ends a wait.

        Without ``cancelled``, the :class:`Question` around this call has the same effect once it is closed.
        """
        question = current_question()
        event = cancelled or (question.cancelled if question is not None else threading.Event())
        timing = self._clock.timing
        longest = tenacity.wait_exponential(multiplier=timing.retry_first_wait_s, max=timing.retry_max_wait_s)
        deadline: float | None = None
        last: tenacity.RetryCallState | None = None

        def is_worth_it(state: tenacity.RetryCallState) -> bool:
            nonlocal last
            last = state
            error = state.outcome.exception() if state.outcome is not None else None
            # A changed object is not as it was at a second try either: the caller has to look again.
            again = isinstance(error, StoreError) and error.reason == "unavailable"
            if not again:
                # A missing object is an answer, too.
                self._metrics.add("answers")
                self._metrics.retrying = ""
                if question is not None:
                    question.answered()
            return again

        def is_over(_: tenacity.RetryCallState) -> bool:
            nonlocal deadline
            now = self._clock.monotonic()
            deadline = now + timing.retry_deadline_s if deadline is None else deadline
            return event.is_set() or now > deadline

        def pause(state: tenacity.RetryCallState) -> None:
            assert state.outcome is not None
            assert state.next_action is not None
            error = state.outcome.exception()
            self._metrics.add("retries")
            self._metrics.retrying = str(error)
            if question is not None and isinstance(error, StoreError):
                question.failed(error.message, error.hint)
            if state.attempt_number == 1:
                _log.warning("retrying: %s", self._metrics.retrying)
            if self._clock.wait(event, state.next_action.sleep):
                # Cancelled: this raises the last error.
                state.outcome.result()

        retrying = tenacity.Retrying(
            stop=is_over,
            wait=lambda state: self._clock.rng.uniform(0, longest(state)),
            retry=is_worth_it,
            before_sleep=pause,
            sleep=lambda _: None,
            reraise=True,
        )
        try:
            return retrying(call)
        finally:
            # A cycle: the last state holds the error, whose frames hold that state. The mapped files in them must not
            # wait for the collector.
            if last is not None:
                last.outcome = None
            last = None


class Progress:
    """Passes progress on without counting bytes twice that an attempt sends again. Thread-safe."""

    def __init__(self, report: Callable[[int], None] | None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._attempt = 0
        self._reported = 0

    def restart(self) -> None:
        """Begins another attempt at byte 0."""
        with self._lock:
            self._attempt = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._attempt += count
            news = self._attempt - self._reported
            self._reported = max(self._reported, self._attempt)
        if news > 0 and self._report is not None:
            self._report(news)
