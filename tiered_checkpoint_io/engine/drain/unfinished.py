"""Operations of the drain that are begun and not done, and when it is their turn again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.durable.arrivals import Arrivals
from tiered_checkpoint_io.engine.durable.files import put_description
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.memory.space import is_scarcity
from tiered_checkpoint_io.model.index import IndexRow
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores.base import Store

#: How often a save that waits shows that within the time after which it would be taken for given up.
_SHOWS = 4
#: After so many, any backoff is at its bound.
_DOUBLINGS = 32


@dataclass(slots=True)
class Begun:
    """An operation that was begun and is not done: it failed, or waits for parts of other nodes.

    Attributes:
        tidies: Whether it only removes, which goes after all that was not begun; an alias is not held up with it.
        due: When it is the next one's turn, by the monotonic clock.
        failures: How often it has failed.
        permanent: Whether it will fail again unless something is mended.
        arrivals: The parts that have come; None where it does not wait for any.
        began: Of a part of several, when it was begun first.
        sent_s: For how long this drain has sent it, seconds, without the wait for others.
        size: Bytes of the whole checkpoint; 0 until all parts have come.
        moved: When the last one came.
        shown: When other drains were shown last that it waits.
        is_late: Whether that is so long ago that it was reported as a failure.
        pause: From its last look for them to the next, seconds.
        most_failures: Of one that was to be given up, and was not, because they had come: how often it had failed.
    """

    tidies: bool = False
    due: float = 0.0
    failures: int = 0
    permanent: bool = False
    arrivals: Arrivals | None = None
    began: float | None = None
    sent_s: float = 0.0
    size: int = 0
    moved: float = 0.0
    shown: float = 0.0
    is_late: bool = False
    pause: float = 0.0
    most_failures: float = math.inf

    @property
    def is_refused(self) -> bool:
        """Whether it is one of those that are tried one at a time, until one of them is not refused any more."""
        return self.permanent and self.tidies

    def failed(self, error: Exception, clock: Clock, last: float = 0.0) -> None:
        """Plans the next attempt; one that is refused comes after the ``last`` of those that are."""
        timing = clock.timing
        self.failures += 1
        self.permanent = not (isinstance(error, TieredCheckpointError) and error.retryable) and not is_scarcity(error)
        # Of a thousand failures, the power is no float any more.
        backoff = min(timing.redo_max_s, timing.redo_first_s * 2 ** min(self.failures - 1, _DOUBLINGS))
        after = max(clock.monotonic(), last) if self.is_refused else clock.monotonic()
        self.due = after + (self.pause if self.is_late else timing.redo_permanent_s if self.permanent else backoff)


class Unfinished(dict[str, Begun]):
    """All that is begun and not done, by the ids of the operations.

    Attributes:
        queued: The ids of all that was queued at the last look.
    """

    queued: Collection[str] = ()

    def waiting(self, queued: Collection[str], now: float) -> dict[str, float]:
        """Those of the operations in the queue whose turn has not come again, and when it does."""
        is_new = any(op_id not in self.queued for op_id in queued)
        for op_id in self.keys() - set(queued):
            del self[op_id]
        self.queued = queued
        if is_new:
            # What fails for good is tried again when there is something new to do; of what is refused, one: there may
            # be a delete for each save of a long run.
            again = [begun for begun in self.values() if begun.permanent and not begun.tidies]
            again += sorted(self._refused, key=lambda begun: begun.due)[:1]
            for begun in again:
                begun.due = min(begun.due, now)
        return {op_id: begun.due for op_id, begun in self.items() if begun.due > now}

    @property
    def later(self) -> set[str]:
        """Those whose turn comes after all that was not begun: nothing that uploads waits for them."""
        return {op_id for op_id, begun in self.items() if begun.tidies}

    @property
    def _refused(self) -> list[Begun]:
        return [begun for begun in self.values() if begun.is_refused]

    @property
    def last_refused(self) -> float:
        """When the last of those that are refused is due."""
        return max((begun.due for begun in self._refused), default=0.0)

    def allow(self, now: float) -> None:
        """Has all that is refused be tried now, as one of them is not any more."""
        for begun in self._refused:
            begun.due = now

    @contextlib.contextmanager
    def sending(self, op_id: str, clock: Clock) -> Iterator[None]:
        """Measures, in the block, how long a part of several is sent."""
        began = clock.monotonic()
        try:
            yield
        finally:
            # Of one that fails, what it has sent is not sent again.
            mine = self.setdefault(op_id, Begun())
            mine.began = began if mine.began is None else mine.began
            mine.sent_s += clock.monotonic() - began

    def waits(self, part: Part, clock: Clock) -> Begun:
        """The save of a coordinator's part that is sent, as one that waits for the parts of others."""
        mine, now = self.setdefault(part.save_id, Begun()), clock.monotonic()
        # What an earlier drain has sent may have rested since.
        is_sent_now = mine.began is not None
        mine.began = now if mine.began is None else mine.began
        if mine.arrivals is None:
            mine.arrivals, mine.moved, mine.is_late = Arrivals(part), now, False
            mine.shown = now if is_sent_now else -math.inf
            mine.pause = clock.timing.gather_first_s
        return mine

    def gather(self, store: Store, part: Part, timeout_s: float, clock: Clock) -> dict[int, IndexRow] | None:
        """Looks for the other parts of a save, by one list for each thousand; None where it is not its turn yet.

        To wait is no failure as long as parts come. Once none has for ``timeout_s`` seconds, it is one, and is
        raised once; looks for them continue, more rarely.

        Raises:
            DrainError: None has come for ``timeout_s`` seconds.
        """
        now, timing, mine = clock.monotonic(), clock.timing, self.waits(part, clock)
        assert mine.arrivals is not None
        if mine.arrivals.look(store):
            mine.moved, mine.is_late = now, False
        mine.due, mine.permanent = now + mine.pause, mine.is_late
        mine.pause = min(timing.redo_max_s if mine.is_late else timing.gather_max_s, 2 * mine.pause)
        if mine.arrivals.missing:
            if now - mine.shown >= timeout_s / _SHOWS:
                # Other drains remove what has rested for that long.
                mine.shown = now
                put_description(store, part)
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
                # Its own turn says what is wrong with it.
                with contextlib.suppress(TieredCheckpointError):
                    arrivals.look(store)
                if not arrivals.missing:
                    begun.due, is_first = now, False
        if not is_first:
            return None
        # Whatever becomes of it now, it has not to wait for others.
        rows, mine.arrivals, mine.is_late = mine.arrivals.rows, None, False
        mine.size = sum(size for row in rows.values() for _, size in row.files)
        return rows

    def lost(self, part: Part) -> set[str]:
        """Ids of saves that failed or wait, for :func:`superseded` to pick from, now that a part is there."""
        lost = {op_id for op_id, begun in self.items() if begun.failures}
        if part.commits and part.content.parts > 1:
            # Parts of one series are sent in the order of its saves: what was missing at the last look will not come.
            lost |= {op_id for op_id, begun in self.items() if begun.arrivals is not None}
        return lost
