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
        question, clock, timing = current_question(), self._clock, self._clock.timing
        event = cancelled or (question.cancelled if question is not None else threading.Event())
        longest_s, deadline = timing.retry_first_wait_s, 0.0
        while True:
            try:
                result = call()
            except BaseException as error:
                # A changed object is not as it was at a second try either: the caller has to look again.
                if not isinstance(error, StoreError) or error.reason != "unavailable":
                    # A missing object is an answer, too.
                    self._answered(question)
                    raise
                now, is_first = clock.monotonic(), not deadline
                deadline = deadline or now + timing.retry_deadline_s
                if event.is_set() or now > deadline:
                    raise
                self._metrics.add("retries")
                self._metrics.retrying = str(error)
                if question is not None:
                    question.failed(error.message, error.hint)
                if is_first:
                    _log.warning("retrying: %s", self._metrics.retrying)
                if clock.wait(event, clock.rng.uniform(0, longest_s)):
                    raise
                longest_s = min(2 * longest_s, timing.retry_max_wait_s)
            else:
                self._answered(question)
                return result

    def _answered(self, question: Question[Any] | None) -> None:
        self._metrics.add("answers")
        self._metrics.retrying = ""
        if question is not None:
            question.answered()


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
