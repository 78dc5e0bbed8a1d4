"""Time, waiting, randomness, and the bounds and intervals of the engine: one object that is handed in.

Whatever reads a clock, waits, polls or draws a random number does so by a :class:`Clock` that its owner passed to
it, so that a test can hand in another: with shorter bounds, or with a time that only the test moves.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """How often the engine looks, and how long it waits: seconds, each field with its reason."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of this machine.

    Attributes:
        timing: The bounds and intervals that go with it.
        rng: Where random numbers and names come from.
    """

    timing: Timing = field(default_factory=Timing)
    rng: random.Random = field(default_factory=random.SystemRandom)

    def wall(self) -> float:
        """Seconds since the epoch, for people and for comparing machines; it may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits for an event, for ``seconds`` at most; whether it is set."""
        return event.wait(seconds)


#: What is used where nothing else is handed in.
SYSTEM = Clock()
