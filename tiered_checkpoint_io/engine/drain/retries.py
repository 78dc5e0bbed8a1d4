"""When an operation that failed is due again."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.memory.space import NO_SPACE

_SCARCE = (errno.EMFILE, errno.ENFILE, *NO_SPACE)


@dataclass(slots=True)
class _Retry:
    attempts: int
    due: float
    permanent: bool


class Retries:
    """The failed operations of one drain, and their next attempts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._retries: dict[str, _Retry] = {}

    @property
    def tried(self) -> Collection[str]:
        """The operations that have failed, and are to be tried again."""
        return self._retries.keys()

    def failed(self, op_id: str, error: Exception) -> int:
        """Plans the next attempt of an operation; how many it had."""
        timing, attempts = self._clock.timing, self.attempts(op_id) + 1
        permanent = not (isinstance(error, TieredCheckpointError) and error.retryable) and not is_scarcity(error)
        backoff = min(timing.redo_max_s, timing.redo_first_s * 2 ** (attempts - 1))
        due = self._clock.monotonic() + (timing.redo_permanent_s if permanent else backoff)
        self._retries[op_id] = _Retry(attempts, due, permanent)
        return attempts

    def attempts(self, op_id: str) -> int:
        """How often an operation has failed."""
        return self._retries[op_id].attempts if op_id in self._retries else 0

    def forget(self, op_id: str) -> None:
        """Plans nothing more for an operation."""
        self._retries.pop(op_id, None)

    def not_due(self, now: float) -> dict[str, float]:
        """The operations whose next attempt is still to wait, and until when."""
        return {op_id: retry.due for op_id, retry in self._retries.items() if retry.due > now}

    def all_permanent(self, op_ids: Iterable[str]) -> bool:
        """Whether all of these that have failed will fail again, and some have."""
        failing = [self._retries[op_id] for op_id in op_ids if op_id in self._retries]
        return bool(failing) and all(retry.permanent for retry in failing)

    def retry_permanent_now(self) -> None:
        """Has what fails for good tried again: something may have been mended."""
        for retry in self._retries.values():
            retry.due = min(retry.due, self._clock.monotonic()) if retry.permanent else retry.due


def is_scarcity(error: BaseException) -> bool:
    """Whether it is for want of something that others of this node may give back."""
    return any(isinstance(each, OSError) and each.errno in _SCARCE for each in (error, error.__cause__))
