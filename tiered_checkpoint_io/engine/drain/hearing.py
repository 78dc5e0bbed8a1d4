"""What a process heard of its background operations: for who polls, and for who is to be shown failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.model import ids

#: More have ended where nobody polls.
_UNPOLLED = 256


class Heard:
    """Outcomes, each given once to who polls; and failures, each shown once, whoever polls."""

    def __init__(self, dirpath: str) -> None:
        """Takes the durable tier, for the text of failures."""
        self._dirpath = dirpath
        self._unpolled: deque[Outcome] = deque(maxlen=_UNPOLLED)
        self._unshown: list[Outcome] = []

    def add(self, fresh: Iterable[Outcome]) -> None:
        """Takes what has just ended."""
        for outcome in fresh:
            self._unpolled.append(outcome)
            if outcome.state == "failed" and outcome.action != "cancel":
                self._unshown.append(outcome)

    def polled(self) -> list[Outcome]:
        """What ended since the last call."""
        fresh = [*self._unpolled]
        self._unpolled.clear()
        return fresh

    def failures(self) -> list[tuple[Outcome, SaveError]]:
        """What failed since the last call, and how that is told."""
        unshown, self._unshown = self._unshown, []
        return [(outcome, self._error(outcome)) for outcome in unshown]

    def _error(self, outcome: Outcome) -> SaveError:
        return SaveError(
            f"{outcome.action} of {outcome.name} did not reach the durable tier: {outcome.error}",
            operation=outcome.action,
            tier="durable",
            key=ids.join_url(self._dirpath, outcome.name),
            step=outcome.step if outcome.step >= 0 else None,
            hint="it stays in node memory and is tried again",
        )
