"""What becomes of one rank's failure becomes of all, at their next exchange.

Ranks that restore together talk in a fixed order. One that raises in between would leave the others waiting for as
long as a node may take to fetch. Inside ``with Together(group)`` it comes to one more exchange instead, and tells
there what happened: the others, who are on their way to an exchange of theirs, meet it there and raise the same.
Every rank makes as many exchanges as any other, for the block ends with one, too.

Transfers between two ranks are no exchanges: see ``carrying`` for how a rank that fails in one goes on to its end.
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
class Together:
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

    def __enter__(self) -> Together:
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
            # Who is lost to this rank hears of it by the end of its connections.
            with suppress(LostRankError):
                gathered = self._do(self._group.all_gather, _Failed(portable(error, self.rank)))
            # Of several, all raise the same one.
            raise_first((each.error for each in gathered if isinstance(each, _Failed)), error)

    def all_gather(self, obj: Any) -> list[Any]:
        """As :meth:`Group.all_gather`.

        Raises:
            TieredCheckpointError: What some rank failed of since the last exchange.
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
