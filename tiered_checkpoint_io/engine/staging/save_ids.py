"""The save ids that one process gives out: each sorts after all seen ids, independently of its machine's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids


class SaveIds:
    """Gives out save ids.

    Attributes:
        seen: The newest id that was seen in any tier, and not given out by this process itself.
    """

    def __init__(
        self,
        clock: Clock,
        log: Logger,
        *,
        held: Callable[[], Iterable[str]],
        learnt: Callable[[], str | None] = lambda: None,
        met_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes the sources of others' ids.

        Args:
            clock: When a run begins.
            log: Logger to use.
            held: Ids in this node's memory.
            learnt: The newest id on the durable tier, once another thread knows it.
            met_others: True if other runs may have saved since the last call.
        """
        self._clock = clock
        self._log = log
        self._held = held
        self._learnt = learnt
        self._met_others = met_others
        self._run_id: str | None = None
        self._counter = 0
        self.seen: str | None = None

    @property
    def newest(self) -> str | None:
        """The newest that this process knows of others."""
        return max(filter(None, (self.seen, self._learnt())), default=None)

    def next(self) -> str:
        """Returns the id of the next operation of this process."""
        newest, own = self.newest, None
        if self._run_id is not None:
            own = ids.save_id(self._run_id, self._counter + 1)
        if own is not None and own <= (newest or ""):
            # Other runs have saved since this process' first save, which continued theirs.
            self.restart()
            if newest and newest != self.seen and ids.new_run_id(clock=self._clock) < newest:
                self._log.warning(
                    "this node's clock is behind that of the node which made save %s: what this run saved so far counts"
                    " as older, and what it saves from now on as newer",
                    newest,
                )
        elif own is not None and self._met_others():
            # This process's next save is newer than any save of theirs.
            self.restart()
        if self._run_id is None:
            self._run_id = self.new_run([newest, own, *self._held()])
        self._counter += 1
        return ids.save_id(self._run_id, self._counter)

    def new_run(self, seen: Iterable[str | None]) -> str:
        """Returns the id of a run that begins now, after all save ids that were seen."""
        return ids.new_run_id(after=max(filter(None, seen), default=None), clock=self._clock)

    def follow(self, *seen: str | None) -> None:
        """Makes the next ids sort after the seen ones; None for no id."""
        self.seen = max(filter(None, (self.seen, *seen)), default=None)

    def restart(self) -> None:
        """Begins another run: if others save before the next id is given out, that id is newer."""
        self._run_id, self._counter = None, 0
