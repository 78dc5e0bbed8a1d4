"""What a drain does with a part: sends it, waits for those of other nodes where there are any, commits.

The wait holds nothing up: a save whose parts are not all there is looked at again soon, and again,
more and more rarely, until a bound. One look is one list for each thousand parts that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.arrivals import Arrivals
from tiered_checkpoint_io.engine.durable.commit import commit, put_part
from tiered_checkpoint_io.engine.durable.garbage import Seen, clear_up
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores.base import Store, UploadJournal

#: So many ranks are named in an error.
_NAMED = 16

Fate = Literal["done", "waits", "replaced"]


@dataclass(slots=True)
class _Wait:
    part: Part
    since: float
    due: float
    interval: float
    arrivals: Arrivals
    overtaken: bool = False
    failed: bool = False

    @property
    def complete(self) -> bool:
        return not self.arrivals.missing


class Gathering:
    """The saves of one drain that wait for parts of other nodes."""

    def __init__(self, logger: Logger, clock: Clock = SYSTEM) -> None:
        self._log = logger
        self._clock = clock
        self._waits: dict[str, _Wait] = {}
        self._seen: dict[str, Seen] = {}

    def hopeful(self) -> bool:
        """Whether there is a save whose parts may still come within the bound."""
        return any(not wait.failed for wait in self._waits.values())

    def overtaken(self) -> set[str]:
        """Ids of those that were not whole when a later one was, and will not be."""
        return {op_id for op_id, wait in self._waits.items() if wait.overtaken}

    def keep(self, op_ids: Collection[str]) -> None:
        """Ends the waits of all but these: the others have left the queue, however."""
        self._waits = {op_id: wait for op_id, wait in self._waits.items() if op_id in op_ids}

    def not_due(self, now: float) -> dict[str, float]:
        """Those that need not be looked at yet, and until when. When a failed one is due is the drain's to say."""
        waits = self._waits.items()
        return {op_id: wait.due for op_id, wait in waits if not (wait.complete or wait.failed) and wait.due > now}

    def complete(self) -> set[str]:
        """Ids of those whose parts had all arrived at the last look."""
        return {op_id for op_id, wait in self._waits.items() if wait.complete}

    def since(self, op_id: str) -> float | None:
        """When a save began to wait, by the monotonic clock; None where it does not wait."""
        wait = self._waits.get(op_id)
        return wait.since if wait is not None else None

    def forget(self, op_id: str) -> None:
        """Ends a wait."""
        self._waits.pop(op_id, None)

    def drain(
        self,
        store: Store,
        part: Part,
        files: Mapping[str, memoryview],
        *,
        journal: UploadJournal,
        progress: Callable[[int], None],
        timeout_s: float,
        busy: Callable[[], Collection[str]],
    ) -> Fate:
        """Does what can be done now for a part in this node's memory.

        Args:
            store: The durable tier.
            part: The part.
            files: Its bytes, by basename.
            journal: See :func:`put_part`.
            progress: See :meth:`Store.upload`.
            timeout_s: How long to wait for the other parts; they are left alone for so long, too,
                before they count as garbage.
            busy: Gives the names of later saves.

        Returns:
            ``done``; ``waits`` for parts of other nodes; ``replaced`` by a later save of its name.

        Raises:
            DrainError: The other parts have not come within the bound.
            TieredCheckpointError: As :func:`put_part` and :func:`commit`.
        """
        alone, rows = part.content.parts == 1, None
        if not alone:
            fate = put_part(store, part, files, journal=journal, progress=progress, clock=self._clock)
            if not part.commits or fate == "replaced":
                self.forget(part.save_id)
                return "replaced" if fate == "replaced" else "done"
            if fate == "sent":
                wait = self._look(store, part, timeout_s)
                if wait is None:
                    return "waits"
                rows = wait.arrivals.rows
        # Whatever becomes of it now, it has not to wait for others.
        self.forget(part.save_id)
        fate = commit(store, part, files, rows, journal=journal, progress=progress, clock=self._clock)
        if fate == "replaced":
            return "replaced"
        if not alone:
            for other in self._waits.values():
                # Nodes send parts in the order of their saves: what was missing at this look is lost.
                other.overtaken |= fate == "sent" and self._is_older(other, part) and _in_one_order(other.part, part)
            seen = self._seen.setdefault(part.dirpath, Seen())
            clear_up(store, part, patience_s=timeout_s, busy=busy(), log=self._log, seen=seen)
        return "done"

    def _look(self, store: Store, part: Part, timeout_s: float) -> _Wait | None:
        """Looks for the other parts of a save; None where it is not its turn yet."""
        now, timing = self._clock.monotonic(), self._clock.timing
        mine = self._waits.setdefault(part.save_id, _Wait(part, now, now, timing.gather_first_s, Arrivals(part)))
        mine.arrivals.look(store)
        mine.due = now + mine.interval
        mine.interval = min(timing.gather_max_s, 2 * mine.interval)
        if mine.complete:
            # Parts arrive in the order of their saves, so one that was looked at before may be complete by now.
            older = [wait for wait in self._waits.values() if self._is_older(wait, part)]
            for wait in older:
                wait.arrivals.look(store)
            return None if any(wait.complete for wait in older) else mine
        if now - mine.since < timeout_s:
            return None
        mine.failed = True
        missing = mine.arrivals.missing
        named = ", ".join(str(rank) for rank in missing[:_NAMED])
        raise DrainError(
            f"the parts of {len(missing)} of {part.content.parts} ranks have not come within {timeout_s:.0f} s:"
            f" {named}{' ...' if len(missing) > _NAMED else ''}",
            operation="commit",
            tier="durable",
            key=ids.join_url(part.dirpath, part.name),
            rank=part.rank,
            step=part.content.step,
            hint="see the logs of those ranks and of the drains of their nodes",
        )

    @staticmethod
    def _is_older(wait: _Wait, part: Part) -> bool:
        return wait.part.dirpath == part.dirpath and wait.part.save_id < part.save_id


def _in_one_order(one: Part, other: Part) -> bool:
    """Whether a rank that has a part of both made them one after the other."""
    # Ranks that save without talking keep the order of each series alone.
    local = "local" in (one.content.kind, other.content.kind)
    return not local or ids.line_of(one.save_id) == ids.line_of(other.save_id)
