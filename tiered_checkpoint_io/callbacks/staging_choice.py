"""Whether a capture overlaps training or blocks it: whichever has cost training less. Pure."""

from __future__ import annotations

import statistics
from collections import deque

#: What is measured of each before one is chosen.
_TRIALS = 3
#: How many of the newest count.
_NEWEST = 9
#: So many eager saves follow where overlapping has lost, before it is tried again.
_REST = 100


class StagingChoice:
    """Measures both, and chooses the cheaper one; tries again now and then, since what else runs may change."""

    def __init__(self) -> None:
        self._eager: deque[float] = deque(maxlen=_NEWEST)
        self._overlapped: deque[float] = deque(maxlen=_NEWEST)
        self._rest = 0

    @property
    def overlaps(self) -> bool:
        """Whether the next save is to overlap training."""
        return len(self._eager) >= _TRIALS and self._rest == 0

    def note_eager(self, stall_s: float) -> None:
        """Takes how long training waited for an eager save, seconds."""
        self._eager.append(stall_s)
        self._rest = max(0, self._rest - 1)

    def note_overlapped(self, cost_s: float) -> bool:
        """Takes what an overlapped save cost training, seconds: its stall, and what the steps beside it took longer.

        Returns:
            Whether overlapping has lost, so that the next saves are eager.
        """
        self._overlapped.append(cost_s)
        if len(self._overlapped) < _TRIALS or self._rest:
            return False
        if statistics.median(self._overlapped) < statistics.median(self._eager):
            return False
        self._rest = _REST
        self._overlapped.clear()
        return True
