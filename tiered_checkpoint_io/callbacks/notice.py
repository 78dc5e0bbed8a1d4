"""The notice that a job is to end, of which all ranks learn at the same boundary.

The signal handler only notes the signal. All ranks exchange their notes at the same boundaries, by one small
all-reduce over gloo that runs during the next batch, and has ended by the next boundary.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tiered_checkpoint_io.engine.ranks.run import current_world_size
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, RestoreError, seconds

#: Part of the grace time that is left for the end of the interpreter and of the launcher.
_MARGIN = 0.1


class Notice:
    """Takes note of signals that ask a job to end.

    Attributes:
        received: The first signal; None before.
        leave_by: Time at which this process should have ended, by the monotonic clock, seconds; None before.
    """

    def __init__(self, signals: Iterable[str | int], grace_seconds: float) -> None:
        self.signals = tuple(map(_signal, signals))
        if not self.signals:
            raise ConfigError("signals is empty", hint="name those that tell the job to end, such as SIGTERM")
        self.grace_seconds = seconds("grace_seconds", grace_seconds, above=0)
        self.received: signal.Signals | None = None
        self.leave_by: float | None = None
        #: Session of the job that is handled; None while none is.
        self._session: Session | None = None
        self._earlier: dict[signal.Signals, Any] = {}

    def install(self, session: Session) -> None:
        """Handles the signals from now on; on other threads than the main one, use :meth:`notify`."""
        # Notices of an earlier fit are over.
        self._session, self.received, self.leave_by = session, None, None
        for number in self.signals if handles_signals() else ():
            if signal.getsignal(number) != self._handle:
                self._earlier[number] = _of_none_that_is_over(signal.signal(number, self._handle), number)

    def remove(self) -> signal.Signals | None:
        """Restores the earlier handlers; returns the received signal, once."""
        self._session = None
        for number in self.signals if handles_signals() else ():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._handler_before(number))
        received, self.received = self.received, None
        return received

    def notify(self, number: int) -> bool:
        """Notes that the job is to end, from any thread or signal handler; False if no training runs."""
        told, session = signal.Signals(number), self._session
        if session is None:
            return False
        if self.received is None:
            margin = max(session.clock.timing.preemption_margin_s, _MARGIN * self.grace_seconds)
            used = self.grace_seconds - min(self.grace_seconds / 2, margin)
            self.expect(session.clock.monotonic() + used, session)
            # Last, for another thread looks at it.
            self.received = told
        return True

    def left_s(self, session: Session) -> float:
        """Returns the seconds that are left; infinity without a notice."""
        return math.inf if self.leave_by is None else max(0.0, self.leave_by - session.clock.monotonic())

    def expect(self, leave_by: float, session: Session) -> None:
        """Takes over this rank's notice, or another's; waits for the durable tier end by its deadline."""
        if self.leave_by is None or leave_by < self.leave_by:
            self.leave_by = leave_by
            session.leave_by(leave_by)

    def _handler_before(self, number: signal.Signals) -> Any:
        earlier = self._earlier.get(number)
        # None: installed by other means than Python's.
        return signal.SIG_DFL if earlier is None else earlier

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.notify(number):
            # Another library that replaced this handler meanwhile has restored it since.
            earlier = self._handler_before(signal.Signals(number))
            signal.signal(number, earlier)
            if callable(earlier):
                earlier(number, frame)
            else:
                signal.raise_signal(number)


def handles_signals() -> bool:
    """Returns True if Python runs signal handlers in this thread, and lets it set them."""
    return threading.current_thread() is threading.main_thread()


def _of_none_that_is_over(handler: Any, number: signal.Signals) -> Any:
    """Skips handlers that Lightning has put back after the training they were for: two would call each other."""
    while isinstance(notice := getattr(handler, "__self__", None), Notice) and notice._session is None:
        handler = notice._handler_before(number)
    return handler


class Agreement:
    """Agrees with all ranks, at the same boundary, whether one has had notice; all ranks make one together."""

    def __init__(self, notice: Notice, session: Session) -> None:
        self.is_reached = False
        self._notice = notice
        self._session = session
        self._bound = timedelta(seconds=float(session.config.support.wait_timeout_s))
        self._group: Any = None
        #: This rank's message at the previous boundary, and its time.
        self._told: tuple[torch.Tensor, Any, float] | None = None
        if current_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._bound)

    def at_boundary(self) -> bool:
        """Returns True to stop here; each rank asks as often as all others, and all get the same answer.

        Raises:
            RestoreError: A rank has not reached the previous boundary within the bound, or is dead.
        """
        if self.is_reached:
            return True
        notice = self._notice
        if self._group is None:
            self.is_reached = notice.received is not None
            return self.is_reached
        if self._told is not None:
            told, work, since = self._told
            try:
                work.wait(self._bound)
            except RuntimeError as error:
                raise RestoreError(
                    f"not all ranks have come to the end of the batch before: {error}",
                    operation="agree",
                    rank=dist.get_rank(),
                    hint="see the logs of the other ranks",
                ) from error
            left = -float(told)
            if not math.isinf(left):
                notice.expect(since + left, self._session)
                self.is_reached = True
                return True
        mine = -math.inf if notice.received is None else -notice.left_s(self._session)
        tensor = torch.tensor([mine], dtype=torch.float64, device="cpu")
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._told = tensor, work, self._session.clock.monotonic()
        return False

    def least(self, count: float) -> float:
        """Returns the least of all ranks' numbers; all ranks call this together."""
        if self._group is None:
            return count
        numbers = torch.tensor([count], dtype=torch.float64, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group)
        return float(numbers)

    def leave(self) -> None:
        """Waits until all ranks are about to leave: a launcher mostly kills the others once one has ended.

        A rank that does not come, or is dead, is not waited for beyond the time that is left.
        """
        if self._group is not None:
            left_s = self._notice.left_s(self._session)
            bound_s = self._session.clock.timing.preemption_margin_s + (0.0 if math.isinf(left_s) else left_s)
            # By messages: a collective under way after its bound would keep the group from closing.
            with contextlib.suppress(RuntimeError):
                dist.monitored_barrier(self._group, timedelta(seconds=max(0.001, bound_s)))

    def close(self) -> None:
        """Gives the process group up."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _signal(told: str | int) -> signal.Signals:
    try:
        number = signal.Signals[told.upper()] if isinstance(told, str) else signal.Signals(told)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"there is no signal {told!r}", hint="such as SIGTERM or SIGUSR1") from error
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(
            f"{number.name} cannot be handled", hint="name a signal that comes before it, such as SIGTERM"
        )
    return number
