"""Which names the durable tier has, as far as one process knows without asking it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class DurableNameCache:
    """The names that were listed once, and what this process has saved and removed since."""

    def __init__(
        self,
        list_names: Callable[[], Iterable[str]],
        queued: Callable[[], Iterable[str]],
        has_worked: Callable[[], bool],
    ) -> None:
        """Takes where to look.

        Args:
            list_names: The names on the durable tier, by one LIST.
            queued: Those whose upload is queued.
            has_worked: Whether a drain has ever worked for this node's memory.
        """
        self._list_names = list_names
        self._queued = queued
        self._has_worked = has_worked
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
        """Whether the durable tier may have a name; asks nothing.

        A process that has not listed the names can't know what earlier ones saved, where a drain has worked for them.
        """
        if name in self._saved:
            return True
        return self._has_worked() if self._listed is None else name in self._listed

    def all(self) -> frozenset[str]:
        """All names on the durable tier, or queued for it: one LIST at first use, none later.

        Raises:
            StoreError: The durable tier could not be asked.
        """
        if self._listed is None:
            self.remember(self._list_names())
        return frozenset(self._listed or ())
