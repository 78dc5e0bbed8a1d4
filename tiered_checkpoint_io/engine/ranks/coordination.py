"""Exchanges between ranks that act together, over the caller's process group: a load makes at most four, and no group.

In an exchange all ranks wait for each other. It carries errors, as in torch's own checkpoints: a rank whose work before
the exchange fails sends its error, and all ranks raise the error of the lowest rank that has one. The timeout of the
process group bounds an exchange, so it has to be longer than a node takes to fetch a checkpoint. A rank that never
comes is noticed earlier, within ``rendezvous_s``: see :meth:`RankGroup.arrive`.

Ranks gather only data that is small for any checkpoint: it travels padded to the largest. Data that grows with the
checkpoint goes out from rank 0, so each rank has it once; only rank 0 gathers it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.ranks.run import current_run, current_world_size
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.memory.node import memory_of, this_boot

_T = TypeVar("_T")
_S = TypeVar("_S")

#: Variable that names the machine if its boot id does not: virtual machines that fail as one, or simulated ones.
MACHINE = "TIERED_CHECKPOINT_MACHINE"


class _Failed(NamedTuple):
    error: TieredCheckpointError | None


class Group:
    """All ranks that act together; without a process group, only this process.

    From :meth:`arrive` on, ``is_first_here`` is True for one rank of each node, and ``has_other_nodes`` if there are
    some.
    """

    rank = 0
    world_size = 1
    is_first_here = True
    has_other_nodes = False

    def arrive(self, node: str = "", what: str = "") -> None:
        """Waits until all ranks have come here."""

    def decide(self, work: Callable[[], _T], choice: Callable[[list[_T]], _S]) -> _S:
        """Returns rank 0's ``choice`` from each rank's result of ``work``; two exchanges, which raise as the others."""
        mine, error = self._tried(work)
        gathered = self._gather(mine)
        return self.broadcast(lambda: choice(_checked(gathered or [])), error)

    def broadcast(self, work: Callable[[], _T], own: Exception | None = None) -> _T:
        """Returns rank 0's result of ``work``; raises as :meth:`all_gather`, then with ``own`` as the cause."""
        sent, error = self._tried(work) if self.rank == 0 else (None, None)
        answer: _T = _checked([self._broadcast(sent)], own or error)[0]
        return answer

    def all_gather(self, work: Callable[[], _T]) -> list[_T]:
        """Returns each rank's result of ``work``, by rank; it has to be small, see above.

        Raises RestoreError if the ranks lost each other, or else the error of the lowest rank whose work has failed.
        """
        mine, error = self._tried(work)
        return _checked(self._all_gather(mine), error)

    def together(self, work: Callable[[], _T]) -> _T:
        """Returns this rank's result of ``work``, which may be large; raises as :meth:`all_gather`."""
        done = list[_T]()
        self.all_gather(lambda: done.append(work()))
        return done[0]

    def _gather(self, obj: Any) -> list[Any] | None:
        return [obj]

    def _broadcast(self, obj: Any) -> Any:
        return obj

    def _all_gather(self, obj: Any) -> list[Any]:
        return [obj]

    def _tried(self, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return work(), None
        except Exception as error:
            return _Failed(portable(error, self.rank)), error


class RankGroup(Group):
    """The ranks of a process group of torch.distributed."""

    def __init__(self, process_group: Any = None, clock: Clock = SYSTEM) -> None:
        """Takes the group; by default all ranks. The clock bounds the wait for ranks that are still to come."""
        import torch.distributed as dist

        self._dist: Any = dist
        self._group: Any = process_group or dist.group.WORLD
        self._clock = clock
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)

    def arrive(self, node: str = "", what: str = "load_checkpoint") -> None:
        """Waits until all ranks have come here, without an exchange: they count themselves in the group's store.

        Processes that share a memory tier are one ``node``; ``what`` is the ranks' common work, for errors. If some
        rank does not come in time, this raises ConfigError.
        """
        from torch.distributed.distributed_c10d import _get_process_group_store

        store, count = _get_process_group_store(self._group), f"tiered/{current_run().attempt}/{self.world_size}"
        rendezvous_s, began = self._clock.timing.rendezvous_s, self._clock.monotonic()
        try:
            # No rank comes to the next load before all have come to this one.
            all_here = f"{count}/{store.add(count, 0) // self.world_size}"
            here = f"{all_here}/{node}"
            self.is_first_here = store.add(here, 1) == 1
            if store.add(count, 1) % self.world_size == 0:
                store.set(all_here, "-")
            try:
                store.wait([all_here], timedelta(seconds=rendezvous_s))
            except RuntimeError:
                # This rank may come again.
                for key in (count, here):
                    store.add(key, -1)
                raise
            self.has_other_nodes = store.add(here, 0) < self.world_size
        except RuntimeError as error:
            # A connection that is refused fails at once.
            bound = f" within {rendezvous_s:.0f} s" if self._clock.monotonic() - began >= rendezvous_s / 2 else ""
            raise ConfigError(
                f"not all {self.world_size} ranks came to {what}{bound}: {str(error).partition(chr(10))[0]}",
                operation="load",
                rank=self.rank,
                hint=f"{what} is a collective call while torch.distributed is initialised: every rank has to make it",
            ) from error

    def _gather(self, obj: Any) -> list[Any] | None:
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._do(self._dist.gather_object, obj, gathered, dst=self._dist.get_global_rank(self._group, 0))
        return gathered

    def _broadcast(self, obj: Any) -> Any:
        objects = [obj]
        self._do(self._dist.broadcast_object_list, objects, src=self._dist.get_global_rank(self._group, 0))
        return objects[0]

    def _all_gather(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        self._do(self._dist.all_gather_object, gathered, obj)
        return gathered

    def _do(self, collective: Callable[..., None], *args: Any, **options: Any) -> None:
        try:
            collective(*args, **options, group=self._group)
        except RuntimeError as error:
            raise RestoreError(
                f"the ranks lost each other while restoring: {error}",
                operation="load",
                rank=self.rank,
                hint="see the log of the rank that failed first",
                reason="lost_rank",
            ) from error


_thread = threading.local()


def train_here() -> None:
    """Notes that this thread trains, and makes the collective calls of its process, as on a worker of Ray Train.

    A Trainer says so itself; a loop of your own that runs on another thread than the main one calls this before a load.
    """
    _thread.trains = True


def trains_here() -> bool:
    """Returns True if this thread may make collective calls: it is the main thread, or one that trains."""
    return threading.current_thread() is threading.main_thread() or getattr(_thread, "trains", False)


def current_group(clock: Clock, *, alone: bool = False, process_group: Any = None) -> Group:
    """Returns the ranks that act together: those of a process group, or, if ``alone``, only this process.

    Raises ConfigError if all ranks act together, and this thread does not train.
    """
    if alone or current_world_size() == 1:
        return Group()
    if process_group is None and not trains_here():
        raise ConfigError(
            "load_checkpoint was called from a thread while torch.distributed is initialised",
            operation="load",
            hint="ranks do it together: call it on the main thread of every rank, or where its Trainer trains; if a"
            " loop of your own trains on a thread, as with Ray Train, call TieredCheckpointIO.train_here() first",
        )
    group = RankGroup(process_group, clock)
    return group if group.world_size > 1 else Group()


def node_of(root: Path) -> str:
    """Names the things that ranks share in a load: a memory tier, and a folder for temporary files.

    Containers with hostnames of their own may share only the memory tier, as by Kubernetes' ``hostPath``.
    """
    return f"{socket.gethostname()}/{memory_of(root)}"


def machine() -> str:
    """Names the machine, with which all memory on it is lost; all its containers say the same."""
    return os.environ.get(MACHINE, "") or this_boot()


def raise_first(errors: Iterable[Exception | None], own: Exception | None = None) -> None:
    """Raises the first error of any rank, if there is one; a traceback then shows this rank's ``own`` as its cause."""
    for theirs in errors:
        if theirs is not None:
            if theirs is own or own is None:
                raise theirs
            raise theirs from own


def portable(error: Exception | None, rank: int) -> TieredCheckpointError | None:
    """Returns the same error if it survives a pickle; its text if it may not."""
    if error is None or isinstance(error, TieredCheckpointError):
        return error
    return RestoreError(f"{type(error).__name__}: {error}", operation="load", rank=rank)


def _checked(results: list[Any], own: Exception | None = None) -> list[Any]:
    raise_first((each.error for each in results if isinstance(each, _Failed)), own)
    return results
