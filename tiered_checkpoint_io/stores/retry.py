"""Repetition of requests, progress of an upload that is repeated, and the bound of a caller's wait for an answer.

A store repeats its requests for minutes, and one request to a server that accepts and never answers may take a minute
by itself. A caller that can do without the answer asks by a :class:`Question`, on a thread of its own, and leaves it
there.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import tenacity

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.base import Metrics

_T = TypeVar("_T")
_THREAD = "tiered-question"

#: Called every ``silence_line_s`` with the seconds of silence so far, and the seconds until the wait ends.
CountDown = Callable[[float, float], None]


class Question(Generic[_T]):
    """Requests to a store on a thread of their own. Each answer to one of them ends a silence."""

    def __init__(self, ask: Callable[[], _T], *, clock: Clock = SYSTEM) -> None:
        """Begins; ``ask`` must do no more than ask stores, because it may still run when its caller has left."""
        self._clock = clock
        self._answered_at = clock.monotonic()
        #: One for each block of :func:`local_work` that a thread of it is in.
        self.local: list[None] = []
        self._trouble = ("", "")
        self._ended = threading.Event()
        self._answer: Future[_T] = Future()
        #: Once it is set, no request is repeated.
        self.cancelled = threading.Event()
        context = contextvars.copy_context()
        context.run(_asking.set, self)
        clock.start(functools.partial(context.run, self._run, ask), _THREAD)

    def _run(self, ask: Callable[[], _T]) -> None:
        try:
            self._answer.set_result(ask())
        except BaseException as error:
            self._answer.set_exception(error)
        finally:
            self._ended.set()

    def answered(self) -> None:
        """Takes note that the store has answered a request."""
        self._answered_at, self._trouble = self._clock.monotonic(), ("", "")

    def _silent_s(self) -> float:
        return 0.0 if self.local else self._clock.monotonic() - self._answered_at

    def failed(self, message: str, hint: str | None) -> None:
        """Takes note of an error for which a request is repeated: a server that is busy says so, again and again."""
        # Not the error: its frames hold mapped files.
        self._trouble = message, hint or ""

    def within(self, seconds: float, count_down: CountDown | None = None) -> bool:
        """Returns True if all is answered before the store has been silent for ``seconds``."""
        every = self._clock.timing.silence_line_s
        while not self._ended.is_set():
            silent = self._silent_s()
            if silent >= seconds:
                return False
            line = every * (silent // every + 1)
            if self._clock.wait(self._ended, min(line, seconds) - silent):
                break
            if count_down is not None and line < seconds and self._silent_s() >= line:
                count_down(line, seconds - line)
        return True

    def silence(self, what: str, seconds: float) -> StoreError:
        """Returns the error for a store, called ``what``, without an answer for so many seconds."""
        text, advice = f"{what} has not answered for {seconds:.0f} s", "check endpoint_url and the network"
        # Its thread may write to this meanwhile.
        message, hint = self._trouble
        if message:
            text, advice = f"{text}: {message}", hint or f"where it lasts, {advice}"
        return StoreError(text, operation="ask", tier="durable", hint=advice, reason="unavailable")

    def result(self) -> _T:
        """Waits for the result of ``ask``, as long as the store's own bounds allow; raises as ``ask``."""
        while not self._clock.wait(self._ended, self._clock.timing.silence_line_s):
            pass
        return self._answer.result()

    def close(self) -> None:
        """Ends all repetitions of requests; a request that is under way ends by itself."""
        self.cancelled.set()


_asking: contextvars.ContextVar[Question[Any] | None] = contextvars.ContextVar("tiered_asking", default=None)


def asking() -> list[threading.Thread]:
    """Returns the threads that ask a store, also those that no caller waits for any more."""
    return [each for each in threading.enumerate() if each.name == _THREAD]


def current_question() -> Question[Any] | None:
    """Returns the question that this thread asks for; None if its caller waits without a bound."""
    return _asking.get()


def moving() -> Callable[[], None]:
    """Returns a callback for progress between two answers: the store then does not count as silent."""
    question = current_question()
    return question.answered if question is not None else lambda: None


@contextlib.contextmanager
def local_work() -> Iterator[None]:
    """Marks a block that may take long without a store, such as a wait for a disk: no store counts as silent then."""
    question = current_question()
    if question is None:
        yield
        return
    question.local.append(None)
    try:
        yield
    finally:
        question.answered()
        question.local.pop()


def answer_within(
    seconds: float,
    ask: Callable[[], _T],
    *,
    what: str = "the durable tier",
    clock: Clock = SYSTEM,
    count_down: CountDown | None = None,
) -> _T:
    """Returns the result of ``ask``, or raises StoreError if its store is silent for so many seconds.

    Each answer to a request begins a new silence. ``ask`` only asks a store: it may still run when this has raised.
    ``what`` names the store in errors. ``count_down`` is called every 5 s of silence.
    """
    question = Question(ask, clock=clock)
    try:
        if not question.within(seconds, count_down):
            raise question.silence(what, seconds)
        return question.result()
    finally:
        question.close()


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
        question, timing = current_question(), self._clock.timing
        event = cancelled or (question.cancelled if question is not None else threading.Event())
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
            error = state.outcome.exception()
            self._metrics.add("retries")
            self._metrics.retrying = str(error)
            if question is not None and isinstance(error, StoreError):
                question.failed(error.message, error.hint)
            if state.attempt_number == 1:
                _log.warning("retrying: %s", self._metrics.retrying)
            if self._clock.wait(event, state.upcoming_sleep):
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
