"""What has become of a process' operations, each outcome once."""

from __future__ import annotations

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.queue import Queue

#: So many taken outcomes are remembered before those go that the log has forgotten: a few times what it keeps.
_SEEN = 2048


class NewOutcomes:
    """Outcomes that were not taken yet; those that were there before are none."""

    def __init__(self, queue: Queue) -> None:
        """Takes what is written by the drain."""
        self._queue = queue
        self._seen = set(map(_key, queue.outcomes()))
        self._last: tuple[bytes | None, str] = None, ""

    def take(self) -> tuple[list[Outcome], str]:
        """Outcomes that were not taken yet, and :attr:`DrainProgress.trouble`."""
        version = self._queue.poll_with_heartbeat()
        if version == self._last[0]:
            return [], self._last[1]
        outcomes = self._queue.outcomes()
        fresh = [outcome for outcome in outcomes if _key(outcome) not in self._seen]
        self._last = version, self._queue.progress().trouble
        self._seen.update(map(_key, fresh))
        if len(self._seen) > _SEEN:
            # Those that the log has forgotten do not come again.
            self._seen.intersection_update(map(_key, outcomes))
        return fresh, self._last[1]

    def skip(self, outcome: Outcome) -> None:
        """Leaves one out, because a caller has waited for it."""
        self._seen.add(_key(outcome))


def _key(outcome: Outcome) -> tuple[str, str, str]:
    """What makes an outcome a new one: an operation that is tried again may fail for another reason."""
    return outcome.op_id, outcome.state, outcome.error_type
