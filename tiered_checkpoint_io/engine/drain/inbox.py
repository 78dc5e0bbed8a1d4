"""Results of background operations, for who polls and for who is to be shown failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.model import ids

#: Kept for a caller that does not poll.
_UNREAD = 256


class OutcomeInbox:
    """Outcomes, each published once to who polls; and failures, each once, whether anything polls or not."""

    def __init__(self, dirpath: str) -> None:
        """Takes the durable tier, for the text of failures."""
        self._dirpath = dirpath
        self._unread: deque[Outcome] = deque(maxlen=_UNREAD)
        self._failed: list[Outcome] = []

    def report(self, fresh: Iterable[Outcome]) -> None:
        """Takes what has just ended."""
        for outcome in fresh:
            self._unread.append(outcome)
            if outcome.state == "failed" and outcome.action != "cancel":
                self._failed.append(outcome)

    def publish(self) -> list[Outcome]:
        """What ended since the last call."""
        fresh = [*self._unread]
        self._unread.clear()
        return fresh

    def failures(self) -> list[tuple[Outcome, SaveError]]:
        """What failed since the last call, each with its error."""
        failed, self._failed = self._failed, []
        return [(outcome, self._error(outcome)) for outcome in failed]

    def _error(self, outcome: Outcome) -> SaveError:
        return SaveError(
            f"{outcome.action} of {outcome.name} did not reach the durable tier: {outcome.error}",
            operation=outcome.action,
            tier="durable",
            key=ids.join_url(self._dirpath, outcome.name),
            step=outcome.step if outcome.step >= 0 else None,
            hint="it stays in node memory and is tried again",
        )
