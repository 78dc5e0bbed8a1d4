"""Operations of the drain that are begun and not done, and when it is their turn again."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.durable.arrivals import Arrivals
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.memory.space import is_scarcity


@dataclass(slots=True)
class Begun:
    """An operation that was begun and is not done: it failed, or waits for parts of other nodes.

    Attributes:
        due: When it is the next one's turn, by the monotonic clock.
        failures: How often it has failed.
        permanent: Whether it will fail again unless something is mended.
        arrivals: The parts that have come; None where it does not wait for any.
        since: When it began to wait for them.
        pause: From its last look for them to the next, seconds.
    """

    due: float = 0.0
    failures: int = 0
    permanent: bool = False
    arrivals: Arrivals | None = None
    since: float | None = None
    pause: float = 0.0

    def failed(self, error: Exception, clock: Clock) -> None:
        """Plans the next attempt."""
        timing = clock.timing
        self.failures += 1
        self.permanent = not (isinstance(error, TieredCheckpointError) and error.retryable) and not is_scarcity(error)
        backoff = min(timing.redo_max_s, timing.redo_first_s * 2 ** (self.failures - 1))
        self.due = clock.monotonic() + (timing.redo_permanent_s if self.permanent else backoff)
