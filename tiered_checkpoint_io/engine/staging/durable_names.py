"""Names on the durable tier, as far as one process knows without another request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.stores.silence import Question


class DurableNameCache:
    """The names that were listed once, with this process' saves and removals since."""

    def __init__(
        self,
        list_names: Callable[[], Iterable[str]],
        queued: Callable[[], Iterable[str]],
        has_worked: Callable[[], bool],
        clock: Clock,
    ) -> None:
        """Takes the sources of names.

        Args:
            list_names: The names on the durable tier, by one LIST, on a thread of its own.
            queued: Names whose upload is queued.
            has_worked: True if a drain has ever worked for this node's memory.
            clock: For waits.
        """
        self._list_names = list_names
        self._queued = queued
        self._has_worked = has_worked
        self._clock = clock
        self._question: Question[Iterable[str]] | None = None
        self._listed: set[str] | None = None
        self._saved: set[str] = set()

    def remember(self, listed: Iterable[str]) -> None:
        """Takes the names on the durable tier, as they were just listed."""
        self._listed = {*listed, *self._queued()}

    def note(self, name: str, *, exists: bool) -> None:
        """Takes note of a name that this process saves or removes."""
        for names in (self._saved, self._listed):
            if names is not None:
                (names.add if exists else names.discard)(name)

    def may_be_durable(self, name: str) -> bool:
        """Returns True if the durable tier may have a name; sends no request. A process that has not listed the names
        does not know earlier processes' saves, if a drain has uploaded them.
        """
        if name in self._saved:
            return True
        return self._has_worked() if self._listed is None else name in self._listed

    def all(self, patience_s: float = math.inf) -> frozenset[str]:
        """Returns all names on the durable tier, or queued for it: one LIST at first use, none later.

        Args:
            patience_s: Bound of a silence of the durable tier, seconds; by default until its store gives up.

        Raises:
            StoreError: The durable tier could not be read, or was silent for so long.
        """
        if self._listed is None:
            # Saves since the names were asked for may be committed already.
            self.remember([*self._ask(patience_s), *self._saved])
        return frozenset(self._listed or ())

    def close(self) -> None:
        """Ends the wait for an answer."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _ask(self, patience_s: float) -> Iterable[str]:
        # A question that was not answered in time is not asked again: the next caller has its answer, or no wait.
        question = self._question = self._question or Question(self._list_names, clock=self._clock)
        if not question.within(patience_s):
            raise question.silence("the durable tier", patience_s)
        self._question = None
        return question.result()
