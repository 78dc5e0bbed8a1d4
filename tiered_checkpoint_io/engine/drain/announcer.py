"""Tells what became of the drain's operations: each outcome once in the log, and each failure once to who asks.

What an earlier start left in the queue has failed there: of that, this process only warns.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.messages import say_outcome
from tiered_checkpoint_io.engine.drain.operations import SAVES, Outcome
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.logs import CheckpointLogger
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

T = TypeVar("T")
#: Outcomes that are kept for a caller that does not poll.
_UNREAD = 256


class Announcer:
    """Of one process. Threads may call it at once: the end of a save that runs in the background does."""

    def __init__(self, config: TieredCheckpointConfig, log: CheckpointLogger, counts: Counter[str]) -> None:
        """Takes the job's configuration, where to log, and where failures are counted."""
        self._config = config
        self._log = log
        self._counts = counts
        self._lock = threading.RLock()
        self._unread: deque[Outcome] = deque(maxlen=_UNREAD)
        self._unshown: list[SaveError] = []
        self._trouble = ""

    def look(self, drain: DrainHandle, *, leads: bool) -> None:
        """Logs what is new, and counts the failed uploads of what this start has queued.

        Args:
            drain: Where to look.
            leads: Whether this process speaks for its node.
        """
        with self._lock:
            fresh, trouble = looking(self._log, lambda: drain.news(keeps_up=leads), (list[Outcome](), ""))
            self._unread.extend(fresh)
            for outcome in fresh:
                inherited = drain.is_inherited(outcome)
                failure = say_outcome(self._log, outcome, self._config, leads=leads, inherited=inherited)
                if failure is not None and not inherited:
                    self._counts["failed"] += leads and outcome.action in SAVES
                    self._unshown.append(failure)
            if trouble and trouble != self._trouble and leads:
                text = "the drain can't get at its queue, so nothing is uploaded; it tries again: %s"
                self._log.error(text, trouble)
            self._trouble = trouble

    def take(self) -> list[Outcome]:
        """The outcomes since the last call."""
        with self._lock:
            fresh, self._unread = [*self._unread], deque(maxlen=_UNREAD)
        return fresh

    def first_failure(self) -> SaveError | None:
        """The first failure since the last call."""
        with self._lock:
            failures, self._unshown = self._unshown, []
        return failures[0] if failures else None


def looking(log: CheckpointLogger, look: Callable[[], T], otherwise: T) -> T:
    """What a look at the queue gives; where there can be none just now, something else."""
    try:
        return look()
    except OSError as unread:
        # For example, no file descriptor is left: training goes on, and the next call looks again.
        log.error("could not read the outcomes of earlier saves: %s", unread)
        return otherwise
