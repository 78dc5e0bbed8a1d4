"""Operations of the drain that were begun and are not done, and when their turn comes again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.durable.files import Arrivals
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.memory.node import is_scarcity
from tiered_checkpoint_io.model.manifest import IndexRow, Part
from tiered_checkpoint_io.stores.base import Store

#: After so many, any backoff is at its bound.
_DOUBLINGS = 32


@dataclass(slots=True)
class Begun:
    """An operation that failed, or that waits for parts of other nodes; moments are by the monotonic clock.

    Attributes:
        is_cleanup: A delete or a retention run; scheduled after new work.
        due: The moment of its next turn.
        permanent: True if it fails again unless the cause is removed.
        arrivals: The parts that have come; None if it does not wait for any. ``moved`` is when the last one came,
            ``pause`` the seconds between looks, and ``is_late`` says that the wait was reported as a failure.
        began: First attempt of a part of several.
        sent_s: Seconds for which this drain has sent it, without the wait for others.
        size: Bytes of the whole checkpoint; 0 until all parts have come.
        failures_when_spared: Failure count when a cancel was ignored because all parts had arrived.
    """

    is_cleanup: bool = False
    due: float = 0.0
    failures: int = 0
    permanent: bool = False
    arrivals: Arrivals | None = None
    began: float | None = None
    sent_s: float = 0.0
    size: int = 0
    moved: float = 0.0
    is_late: bool = False
    pause: float = 0.0
    failures_when_spared: float = math.inf

    @property
    def is_refused(self) -> bool:
        """True if the server refused this cleanup; such cleanups are tried one at a time until one succeeds."""
        return self.permanent and self.is_cleanup

    def failed(self, error: Exception, clock: Clock, last: float = 0.0) -> None:
        """Plans the next attempt; an operation that is refused comes after the ``last`` refused one."""
        timing = clock.timing
        self.failures += 1
        self.permanent = not (isinstance(error, TieredCheckpointError) and error.retryable) and not is_scarcity(error)
        # Of a thousand failures, the power is no float any more.
        backoff = min(timing.redo_max_s, timing.redo_first_s * 2 ** min(self.failures - 1, _DOUBLINGS))
        after = max(clock.monotonic(), last) if self.is_refused else clock.monotonic()
        self.due = after + (self.pause if self.is_late else timing.redo_permanent_s if self.permanent else backoff)


class Unfinished(dict[str, Begun]):
    """Operations that were begun and are not done, by their ids; ``queued`` are all ids at the last look."""

    queued: Collection[str] = ()

    def waiting(self, queued: Collection[str], now: float) -> dict[str, float]:
        """Returns the queued operations whose turn has not come again, and when it comes."""
        is_new = any(op_id not in self.queued for op_id in queued)
        for op_id in self.keys() - set(queued):
            del self[op_id]
        self.queued = queued
        if is_new:
            # Errors for good are tried again when there is something new to do; of refused operations, one: there may
            # be a delete for each save of a long run.
            again = [begun for begun in self.values() if begun.permanent and not begun.is_cleanup]
            again += sorted(self.refused, key=lambda begun: begun.due)[:1]
            for begun in again:
                begun.due = min(begun.due, now)
        return {op_id: begun.due for op_id, begun in self.items() if begun.due > now}

    @property
    def later(self) -> set[str]:
        """Operations whose turn comes after all new ones: no upload waits for them."""
        return {op_id for op_id, begun in self.items() if begun.is_cleanup}

    @property
    def refused(self) -> list[Begun]:
        return [begun for begun in self.values() if begun.is_refused]

    def allow(self, now: float) -> None:
        """Makes all refused operations due now, because one of them is no longer refused."""
        for begun in self.refused:
            begun.due = now

    @contextlib.contextmanager
    def sending(self, op_id: str, clock: Clock) -> Iterator[None]:
        """Measures for how long the block sends a part of several."""
        began = clock.monotonic()
        try:
            yield
        finally:
            # A failed attempt's sent bytes are not sent again.
            mine = self.setdefault(op_id, Begun())
            mine.began = began if mine.began is None else mine.began
            mine.sent_s += clock.monotonic() - began

    def waits(self, part: Part, clock: Clock) -> Begun:
        """Notes that the coordinator's part was sent, and that its save waits for the parts of others."""
        mine, now = self.setdefault(part.save_id, Begun()), clock.monotonic()
        mine.began = now if mine.began is None else mine.began
        if mine.arrivals is None:
            mine.arrivals, mine.moved, mine.is_late = Arrivals(part), now, False
            mine.pause = clock.timing.gather_first_s
        return mine

    def gather(self, store: Store, part: Part, timeout_s: float, clock: Clock) -> dict[int, IndexRow] | None:
        """Looks for the other parts of a save, by one list for each thousand; None if it is not its turn yet.

        Looks continue after a failure, more rarely. If no part has come for ``timeout_s`` seconds, this raises
        DrainError, once.
        """
        now, timing, mine = clock.monotonic(), clock.timing, self.waits(part, clock)
        assert mine.arrivals is not None
        if mine.arrivals.look(store):
            mine.moved, mine.is_late = now, False
        mine.due, mine.permanent = now + mine.pause, mine.is_late
        mine.pause = min(timing.redo_max_s if mine.is_late else timing.gather_max_s, 2 * mine.pause)
        if mine.arrivals.missing:
            if not mine.is_late and now - mine.moved >= timeout_s:
                mine.is_late = True
                raise mine.arrivals.late(timeout_s)
            return None
        mine.due = now
        # Parts of one series arrive in the order of its saves, so one that was looked at before may be complete by now.
        is_first = True
        for begun in self.values():
            arrivals = begun.arrivals
            if arrivals and arrivals.part.save_id < part.save_id and part.series_key == arrivals.part.series_key:
                # The save's own turn reports the error.
                with contextlib.suppress(TieredCheckpointError):
                    arrivals.look(store)
                if not arrivals.missing:
                    begun.due, is_first = now, False
        if not is_first:
            return None
        # The save no longer waits for other parts, with any outcome.
        rows, mine.arrivals, mine.is_late = mine.arrivals.rows, None, False
        mine.size = sum(size for row in rows.values() for _, size in row.files)
        return rows

    def lost(self, part: Part) -> set[str]:
        """Returns ids of saves that failed or wait, from which :func:`superseded` picks once a part is there."""
        lost = {op_id for op_id, begun in self.items() if begun.failures}
        if part.commits and part.content.parts > 1:
            # Parts of one series are sent in the order of its saves: a part missing at the last look will not come.
            lost |= {op_id for op_id, begun in self.items() if begun.arrivals is not None}
        return lost
