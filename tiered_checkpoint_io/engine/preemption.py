"""The notice that a job is to end: a signal on some rank, and all ranks agreeing on where to stop.

The signal handler only notes the signal. All ranks exchange their notes at the same boundaries, by one small
all-reduce over gloo that runs during the next batch: it is waited for at the next boundary, when it has long ended.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError, RestoreError

#: Part of the grace time that is left for the end of the interpreter and of the launcher.
_MARGIN = 0.1


class Notice:
    """Takes note of signals that tell a job to end.

    Attributes:
        received: The first of them; None before.
        leave_by: When this process should have left, by the monotonic clock, seconds; None before.
        clock: For the time that is left.
    """

    def __init__(
        self,
        signals: Iterable[str | int] = ("SIGTERM", "SIGUSR1"),
        *,
        grace_seconds: float = 30.0,
        heard: Callable[[float], None] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """Validates; installs nothing.

        Args:
            signals: By name or number.
            grace_seconds: How long after the signal the process is killed.
            heard: Called from the handler with ``leave_by``: it must do next to nothing.
            clock: For the time that is left.

        Raises:
            ConfigError: No such signal, one that can't be handled, or a grace time that is none.
        """
        self.signals = tuple(map(_signal, signals))
        if not self.signals:
            raise ConfigError("signals is empty", hint="name those that tell the job to end, such as SIGTERM")
        is_number = isinstance(grace_seconds, int | float) and not isinstance(grace_seconds, bool)
        if not is_number or not math.isfinite(grace_seconds) or grace_seconds <= 0:
            raise ConfigError(f"grace_seconds is {grace_seconds!r}", hint="allowed: a number of seconds above 0")
        self.grace_seconds = float(grace_seconds)
        self.received: signal.Signals | None = None
        self.leave_by: float | None = None
        self._heard = heard
        self.clock = clock
        self._earlier: dict[signal.Signals, Any] = {}
        self._installed = False

    def install(self) -> None:
        """Handles the signals from now on; off the main thread, where Python can't, does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._installed = True
        for number in self.signals:
            if signal.getsignal(number) != self._handle:
                self._earlier[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Restores the earlier handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        for number in self.signals:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._handler_before(number))

    def expect(self, leave_by: float) -> None:
        """Takes over another rank's notice."""
        if self.leave_by is None or leave_by < self.leave_by:
            self.leave_by = leave_by
            if self._heard is not None:
                self._heard(leave_by)

    @property
    def left_s(self) -> float:
        """How many seconds are left; without a notice, all there are."""
        return math.inf if self.leave_by is None else max(0.0, self.leave_by - self.clock.monotonic())

    def _handler_before(self, number: signal.Signals) -> Any:
        earlier = self._earlier.get(number)
        # None: installed by other means than Python's.
        return signal.SIG_DFL if earlier is None else earlier

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._installed:
            # Another library that replaced this handler meanwhile has restored it since.
            earlier = self._handler_before(signal.Signals(number))
            signal.signal(number, earlier)
            if callable(earlier):
                earlier(number, frame)
            else:
                signal.raise_signal(number)
        elif self.received is None:
            self.received = signal.Signals(number)
            margin = min(
                self.grace_seconds / 2, max(self.clock.timing.preemption_margin_s, _MARGIN * self.grace_seconds)
            )
            self.expect(self.clock.monotonic() + self.grace_seconds - margin)


class Agreement:
    """Whether any rank has had notice, as all ranks learn at the same boundary."""

    def __init__(self, timeout_s: float) -> None:
        """Makes a process group; all ranks call this together.

        Args:
            timeout_s: Bound of each exchange, seconds.
        """
        self._group: Any = None
        self._mine: tuple[torch.Tensor, Any, float] | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._timeout_s = timeout_s

    def at_boundary(self, notice: Notice) -> bool:
        """Whether to stop here; each rank asks as often as all others, and all get the same answer.

        Args:
            notice: This rank's. Where another has less time left, it takes that over.

        Raises:
            RestoreError: A rank has not come to the boundary before within the bound, or is dead.
        """
        if self._group is None:
            return notice.received is not None
        heard = self._heard()
        if heard is not None:
            notice.expect(heard)
            return True
        mine = torch.tensor([-math.inf if notice.received is None else -notice.left_s], dtype=torch.float64)
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._mine = (mine, work, notice.clock.monotonic())
        return False

    def least(self, count: float) -> float:
        """The least of all ranks' numbers; all ranks call this together."""
        if self._group is None:
            return count
        numbers = torch.tensor([count], dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group)
        return float(numbers)

    def close(self) -> None:
        """Gives the process group up."""
        group, self._group, self._mine = self._group, None, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _heard(self) -> float | None:
        """The earliest ``leave_by`` that a rank told at the boundary before; None where none did."""
        if self._mine is None:
            return None
        told, work, sent = self._mine
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise RestoreError(
                f"not all ranks have come to the end of the batch before: {error}",
                operation="agree",
                rank=dist.get_rank(),
                hint="see the logs of the other ranks",
            ) from error
        left = -float(told)
        return None if math.isinf(left) else sent + left


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
