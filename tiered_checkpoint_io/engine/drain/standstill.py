"""Whether the drain gets on, as a process that waits for it sees it."""

from __future__ import annotations

from collections.abc import Callable

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.queue import DrainProgress
from tiered_checkpoint_io.errors import DrainError

#: What only an answer of the store, bytes that leave, or the end of an operation changes.
_MOVING = ("answers", "bytes.sent", "committed", "uploaded", "failed", "skipped")


class StandstillError(DrainError):
    """Nothing that the drain does has moved for as long as a caller waits for that."""


class Standstill:
    """For how long the drain has moved nothing while this process waits for it."""

    def __init__(self, look: Callable[[], DrainProgress], clock: Clock) -> None:
        """Takes what gives the drain's progress."""
        self._look = look
        self._clock = clock
        self._mark = self._marked()
        self._since = clock.monotonic()
        #: Where it stood when a wait ended for that.
        self._ended: tuple[int, ...] | None = None

    def begin(self) -> None:
        """A wait begins: what stood still before does not count, unless it has already ended a wait."""
        self._mark, self._since = self._marked(), self._clock.monotonic()

    def lasts(self, seconds: float) -> bool:
        """Whether nothing has moved for ``seconds`` of this wait, or since an earlier one ended for that."""
        mark, now = self._marked(), self._clock.monotonic()
        if mark != self._mark:
            self._mark, self._since = mark, now
        if mark != self._ended and now - self._since < seconds:
            return False
        self._ended = mark
        return True

    def _marked(self) -> tuple[int, ...]:
        progress = self._look()
        return (progress.pid, progress.bytes_done, *(progress.counters.get(name, 0) for name in _MOVING))
