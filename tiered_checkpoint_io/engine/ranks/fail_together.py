"""A group in which one rank's failure becomes that of all ranks, at their next exchange.

Ranks that restore together exchange in a fixed order. If one raised in between, the others would wait for as long as
a node may take to fetch. Inside ``with FailTogetherGroup(group)`` it makes one more exchange instead, with its error:
the others get it in their next exchange, and raise the same. The block itself ends with an exchange, so every rank
makes as many as any other.

Transfers between two ranks are no exchanges: see ``transfer`` for how a rank that fails in one goes on to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, final

from tiered_checkpoint_io.engine.ranks.coordination import Group, portable, raise_first
from tiered_checkpoint_io.errors import LostRankError, TieredCheckpointError

_T = TypeVar("_T")


class _Failed(NamedTuple):
    error: TieredCheckpointError | None


@final
class FailTogetherGroup:
    """A group of ranks of which none goes on where another one fails."""

    def __init__(self, group: Group) -> None:
        """Takes the group, which stays the caller's to close.

        Args:
            group: The ranks that restore together.
        """
        self._group = group
        self._is_over = False
        self.rank = group.rank
        self.world_size = group.world_size
        self.node = group.node

    def __enter__(self) -> FailTogetherGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        if error is None:
            self.all_gather(None)
        elif isinstance(error, Exception) and self.world_size > 1:
            gathered: list[Any] = []
            # A rank that is lost to this one learns of it when its connections end.
            with suppress(LostRankError):
                gathered = self._do(self._group.all_gather, _Failed(portable(error, self.rank)))
            # Of several, all raise the same one.
            raise_first((each.error for each in gathered if isinstance(each, _Failed)), error)

    def all_gather(self, obj: Any) -> list[Any]:
        """As :meth:`Group.all_gather`.

        Raises:
            TieredCheckpointError: The error of a rank that has failed since the last exchange.
        """
        gathered: list[Any] = self._do(self._group.all_gather, obj)
        failed = [each.error for each in gathered if isinstance(each, _Failed)]
        if failed:
            self._is_over = True
            raise_first(failed)
        return gathered

    def broadcast(self, obj: Any) -> Any:
        """As :meth:`Group.broadcast`; raises as :meth:`all_gather`."""
        # Rank 0 may have failed, and have nothing to broadcast.
        self.all_gather(None)
        return self._do(self._group.broadcast, obj)

    def gather(self, obj: Any) -> list[Any] | None:
        """As :meth:`Group.gather`; raises as :meth:`all_gather`."""
        # Some rank may have failed, and have nothing to tell.
        self.all_gather(None)
        return self._do(self._group.gather, obj)

    def send(self, data: memoryview, rank: int) -> None:
        """As :meth:`Group.send`."""
        self._do(self._group.send, data, rank)

    def receive(self, data: bytearray | memoryview, rank: int) -> None:
        """As :meth:`Group.receive`."""
        self._do(self._group.receive, data, rank)

    def close(self) -> None:
        """Leaves the group to its owner."""

    def _do(self, call: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return call(*arguments)
        except BaseException:
            # Ranks that lost each other have nothing more to exchange.
            self._is_over = True
            raise
