"""Communication between ranks during a restore: a few collectives, each with a bound.

Ranks gather only data that is small for any checkpoint: every rank gets the data of all ranks, padded to the largest.
Data that grows with the checkpoint goes out from one rank, so each rank has it once; only the sender gathers it.

Ranks that restore together exchange in a fixed order. If one raised in between, the others would wait for as long as a
node may take to fetch. Inside ``with group.failing_together()`` the failed rank makes one more exchange, with its
error: the other ranks get the error in their next exchange, and raise it. The block itself ends with an exchange, so
every rank makes as many as any other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.run import current_run, current_world_size
from tiered_checkpoint_io.engine.ranks.views import tensor_of
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.memory.node import memory_of, this_boot

_T = TypeVar("_T")

#: Variable that names the machine if its boot id does not: virtual machines that fail as one, or simulated ones.
MACHINE = "TIERED_CHECKPOINT_MACHINE"


class _Failed(NamedTuple):
    error: TieredCheckpointError | None


class Group:
    """All ranks that restore together; without a process group, only this process.

    Attributes:
        rank: This process.
        world_size: Number of ranks.
        node: Id of this node; equal for processes that share a memory tier.
    """

    rank = 0
    world_size = 1
    #: True if the ranks have nothing more to exchange: some rank has failed, or they lost each other.
    _is_over = False

    def __init__(self, node: str) -> None:
        self.node = node

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Returns a block in which all ranks fail if one fails."""
        self._is_over = False
        try:
            yield
            self.all_gather(None)
        except Exception as error:
            if not self._is_over and self.world_size > 1:
                gathered: list[Any] = []
                # A rank that is lost to this one learns of that when its connections end.
                with contextlib.suppress(RestoreError):
                    gathered = self._all_gather(_Failed(portable(error, self.rank)))
                # If several ranks have failed, all raise the same error.
                raise_first((each.error for each in gathered if isinstance(each, _Failed)), error)
            raise

    def all_gather(self, obj: Any) -> list[Any]:
        """Returns each rank's ``obj``, by rank; it has to be small, see above.

        Raises:
            RestoreError: The ranks lost each other.
            TieredCheckpointError: The error of a rank that has failed since the last exchange.
        """
        gathered = self._all_gather(obj)
        failed = [each.error for each in gathered if isinstance(each, _Failed)]
        if failed:
            self._is_over = True
            raise_first(failed)
        return gathered

    def broadcast(self, obj: Any, source: int = 0) -> Any:
        """Returns the ``obj`` of one rank; raises as :meth:`all_gather`."""
        if self.world_size == 1:
            return obj
        data = self.share_bytes(pickle.dumps(obj) if self.rank == source else b"", source)
        return obj if self.rank == source else pickle.loads(data)

    def share_bytes(self, data: bytes, source: int) -> bytes | memoryview:
        """Returns the bytes of one rank, of which each other rank gets one copy; raises as :meth:`all_gather`."""
        # The sending rank may have failed, and have nothing to share.
        size = self.all_gather(len(data))[source]
        return self._share_bytes(data, size, source) if size else b""

    def gather(self, obj: Any, to: int = 0) -> list[Any] | None:
        """Returns each rank's ``obj``, by rank, on the rank ``to``, None elsewhere; raises as :meth:`all_gather`.

        The objects travel padded to the largest.
        """
        # Some rank may have failed, and have nothing to send.
        self.all_gather(None)
        return self._gather(obj, to)

    def _all_gather(self, obj: Any) -> list[Any]:
        return [obj]

    def _share_bytes(self, data: bytes, size: int, source: int) -> bytes | memoryview:  # noqa: ARG002
        return data

    def _gather(self, obj: Any, to: int) -> list[Any] | None:  # noqa: ARG002
        return [obj]


class RankGroup(Group):
    """The ranks of the caller's process group, whose timeout bounds each exchange; a load makes no group."""

    def __init__(self, node: str, process_group: Any = None) -> None:
        """Takes the group.

        Args:
            node: See :class:`Group`.
            process_group: Group of torch.distributed; None for all ranks.
        """
        import torch.distributed as dist

        super().__init__(node)
        self._dist: Any = dist
        self._group: Any = process_group or dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self._device = device_of(self._group)

    def arrive(self, clock: Clock, what: str = "load_checkpoint") -> None:
        """Waits until all ranks have come here, without an exchange: they count themselves in the group's store.

        Args:
            clock: With the bound of the wait.
            what: The ranks' common work, for errors.

        Raises:
            ConfigError: Some rank did not come in time.
        """
        from torch.distributed.distributed_c10d import _get_process_group_store

        store, count = _get_process_group_store(self._group), f"tiered/{current_run().attempt}/{self.world_size}"
        rendezvous_s, began = clock.timing.rendezvous_s, clock.monotonic()
        try:
            # No rank comes to the next load before all have come to this one.
            all_here = f"{count}/{store.add(count, 0) // self.world_size}"
            if store.add(count, 1) % self.world_size == 0:
                store.set(all_here, "-")
            try:
                store.wait([all_here], timedelta(seconds=rendezvous_s))
            except RuntimeError:
                # This rank may come again.
                store.add(count, -1)
                raise
        except RuntimeError as error:
            # A connection that is refused fails at once.
            bound = f" within {rendezvous_s:.0f} s" if clock.monotonic() - began >= rendezvous_s / 2 else ""
            raise ConfigError(
                f"not all {self.world_size} ranks came to {what}{bound}: {str(error).partition(chr(10))[0]}",
                operation="load",
                rank=self.rank,
                hint=f"{what} is a collective call while torch.distributed is initialised: every rank has to make it",
            ) from error

    def _all_gather(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        self._do(lambda: self._dist.all_gather_object(gathered, obj, group=self._group))
        return gathered

    def _share_bytes(self, data: bytes, size: int, source: int) -> bytes | memoryview:
        import torch

        def share() -> torch.Tensor:
            if self.rank == source:
                shared = tensor_of(memoryview(data)).to(self._device)
            else:
                # Made here: a rank without room for the buffer is lost to the others, and they raise.
                shared = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._dist.broadcast(shared, src=self._global(source), group=self._group)
            return shared

        shared = self._do(share)
        return data if self.rank == source else shared.cpu().numpy().data

    def _gather(self, obj: Any, to: int) -> list[Any] | None:
        gathered: list[Any] | None = [None] * self.world_size if self.rank == to else None
        self._do(lambda: self._dist.gather_object(obj, gathered, dst=self._global(to), group=self._group))
        return gathered

    def _global(self, rank: int) -> int:
        found: int = self._dist.get_global_rank(self._group, rank)
        return found

    def _do(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            self._is_over = True
            raise RestoreError(
                f"the ranks lost each other while restoring: {error}",
                operation="load",
                rank=self.rank,
                hint="see the log of the rank that failed first",
                reason="lost_rank",
            ) from error


def device_of(process_group: Any) -> str:
    """Returns the device of tensors that a group's ranks exchange: the CPU if possible; not for NCCL.

    The group's own devices decide: the configuration may name a device that a mesh has not made.
    """
    devices: list[str] = [device.type for device in process_group._device_types]
    return "cpu" if "cpu" in devices or not devices else devices[0]


_thread = threading.local()


def train_here() -> None:
    """Notes that this thread trains, and makes the collective calls of its process, as on a worker of Ray Train.

    A Trainer says so itself; a loop of your own that runs on another thread than the main one calls this before a load.
    """
    _thread.trains = True


def trains_here() -> bool:
    """Returns True if this thread may make collective calls: it is the main thread, or one that trains."""
    return threading.current_thread() is threading.main_thread() or getattr(_thread, "trains", False)


def current_group(root: Path, clock: Clock, *, alone: bool = False, process_group: Any = None) -> Group:
    """Returns the ranks that act together, once all have come: those of a process group, or only this process.

    Args:
        root: Root of the memory tier, which identifies the node.
        clock: See :meth:`RankGroup.arrive`.
        alone: True if this process acts without the others.
        process_group: The ranks that act together; all of them if it is None.

    Raises:
        ConfigError: As :meth:`RankGroup.arrive`; or this thread does not train, and all ranks act together.
    """
    node = node_of(root)
    if alone or current_world_size() == 1:
        return Group(node)
    if process_group is None and not trains_here():
        raise ConfigError(
            "load_checkpoint was called from a thread while torch.distributed is initialised",
            operation="load",
            hint="ranks do it together: call it on the main thread of every rank, or where its Trainer trains; if a"
            " loop of your own trains on a thread, as with Ray Train, call TieredCheckpointIO.train_here() first",
        )
    group = RankGroup(node, process_group)
    if group.world_size <= 1:
        return Group(node)
    group.arrive(clock)
    return group


@contextlib.contextmanager
def ready_together(
    open_root: Callable[[], Path], clock: Clock, *, alone: bool = False, process_group: Any = None
) -> Iterator[Group]:
    """Runs a block on all ranks once each has opened its memory tier; in the block, they fail together.

    Args and errors: as :func:`current_group`, except that ``open_root`` opens this rank's memory tier, and returns its
    root; errors of that and of the block are raised on all ranks.
    """
    root, error = Path("/"), None
    try:
        root = open_root()
    except Exception as caught:
        # The other ranks wait in the first exchange: they must get the error there.
        error = caught
    group = current_group(root, clock, alone=alone, process_group=process_group)
    with group.failing_together():
        agree(group, error)
        yield group


def node_of(root: Path) -> str:
    """Names the things that ranks share in a load: a memory tier, and a folder for temporary files.

    Containers with hostnames of their own may share only the memory tier, as by Kubernetes' ``hostPath``.
    """
    return f"{socket.gethostname()}/{memory_of(root)}"


def machine() -> str:
    """Names the machine, with which all memory on it is lost; all its containers say the same."""
    return os.environ.get(MACHINE, "") or this_boot()


def agree(group: Group, error: Exception | None) -> None:
    """Has all ranks fail together: on every rank, raises the error of the lowest rank that has one."""
    raise_first(group.all_gather(portable(error, group.rank)), error)


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
