"""How ranks talk while they restore: a few small object collectives, each with a bound."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.views import at
from tiered_checkpoint_io.errors import LostRankError, RestoreError, TieredCheckpointError, UsageError


class Group(Protocol):
    """All ranks that restore together.

    Attributes:
        rank: This process.
        world_size: How many there are.
        node: Which node this is; equal for processes that share a memory tier.
    """

    rank: int
    world_size: int
    node: str

    def all_gather(self, obj: Any) -> list[Any]:
        """Each rank's ``obj``, by rank."""
        ...

    def broadcast(self, obj: Any) -> Any:
        """Rank 0's ``obj``."""
        ...

    def gather(self, obj: Any) -> list[Any] | None:
        """Each rank's ``obj``, by rank, on rank 0; None on the others."""
        ...

    def send(self, data: memoryview, rank: int) -> None:
        """Sends bytes to a rank, which is receiving as many."""
        ...

    def receive(self, data: bytearray | memoryview, rank: int) -> None:
        """Fills ``data`` with the bytes that a rank sends."""
        ...

    def close(self) -> None: ...


class SingleGroup:
    """One process alone."""

    rank = 0
    world_size = 1

    def __init__(self, node: str) -> None:
        self.node = node

    def all_gather(self, obj: Any) -> list[Any]:
        return [obj]

    def broadcast(self, obj: Any) -> Any:
        return obj

    def gather(self, obj: Any) -> list[Any] | None:
        return [obj]

    def send(self, data: memoryview, rank: int) -> None:
        raise AssertionError(f"a process alone has nobody to send {len(data)} bytes to (rank {rank})")

    def receive(self, data: bytearray | memoryview, rank: int) -> None:
        raise AssertionError(f"a process alone has nobody to get {len(data)} bytes from (rank {rank})")

    def close(self) -> None:
        """Nothing to free."""


class GivenGroup:
    """The ranks of a process group that the caller has; its bounds are the caller's too."""

    def __init__(self, node: str, process_group: Any) -> None:
        """Takes the group.

        Args:
            node: See :class:`Group`.
            process_group: Of torch.distributed. Groups of our own would need a rendezvous in which
                ranks outside it have to take part.
        """
        import torch.distributed as dist

        self._dist: Any = dist
        self._group = process_group
        self.node = node
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

    def all_gather(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        self._do(lambda: self._dist.all_gather_object(gathered, obj, group=self._group))
        return gathered

    def broadcast(self, obj: Any) -> Any:
        box = [obj]
        self._do(lambda: self._dist.broadcast_object_list(box, src=self._global(0), group=self._group))
        return box[0]

    def gather(self, obj: Any) -> list[Any] | None:
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._do(lambda: self._dist.gather_object(obj, gathered, dst=self._global(0), group=self._group))
        return gathered

    def send(self, data: memoryview, rank: int) -> None:
        import torch

        # By its address: torch warns of bytes that it must not write to, though it only reads them.
        tensor = torch.frombuffer(at(data, 0, len(data)), dtype=torch.uint8)
        self._do(lambda: self._dist.send(tensor, dst=self._global(rank), group=self._group))

    def receive(self, data: bytearray | memoryview, rank: int) -> None:
        import torch

        tensor = torch.frombuffer(data, dtype=torch.uint8)
        self._do(lambda: self._dist.recv(tensor, src=self._global(rank), group=self._group))

    def close(self) -> None:
        """Leaves the group to the caller."""

    def _global(self, rank: int) -> int:
        found: int = self._dist.get_global_rank(self._group, rank)
        return found

    def _do(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            # The frames that it went through would keep the group alive, and with it the connections of those who wait.
            traceback.clear_frames(error.__traceback__)
            raise LostRankError(
                f"the ranks lost each other while restoring: {error}",
                operation="load",
                rank=self.rank,
                hint="see the log of the rank that failed first",
            ) from error


class TorchGroup(GivenGroup):
    """All ranks of torch.distributed, over a gloo group that lives for one load."""

    def __init__(self, node: str, clock: Clock, *, timeout_s: float, what: str = "load_checkpoint") -> None:
        """Makes the group; every rank has to.

        Args:
            node: See :class:`Group`.
            clock: With the bound of the wait for ranks that are still to come.
            timeout_s: Bound of each later collective: a node may fetch as long, seconds.
            what: What the ranks come to.

        Raises:
            UsageError: Some rank did not come, or this is not the main thread.
        """
        import torch.distributed as dist

        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"{what} was called from a thread while torch.distributed is initialised",
                operation="load",
                hint="ranks do it together: call it on the main thread of every rank",
            )
        self._dist: Any = dist
        self.node = node
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # Ranks that are all here may take their time to fetch; a rank that never comes is told
        # sooner. A group has one bound, hence two groups.
        meeting, rendezvous_s = None, clock.timing.rendezvous_s
        try:
            meeting = dist.new_group(backend="gloo", timeout=timedelta(seconds=rendezvous_s))
            dist.monitored_barrier(meeting, timeout=timedelta(seconds=rendezvous_s))
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise UsageError(
                f"not all {self.world_size} ranks came to {what} within {rendezvous_s:.0f} s: {error}",
                operation="load",
                rank=self.rank,
                hint=f"{what} is a collective call while torch.distributed is initialised: every rank has to make it",
            ) from error
        finally:
            if meeting is not None:
                dist.destroy_process_group(meeting)

    def close(self) -> None:
        """Ends its connections: whoever still waits for this rank hears of it at once."""
        group, self._group = self._group, None
        if group is not None:
            self._dist.destroy_process_group(group)


def current_group(root: Path, clock: Clock, *, timeout_s: float) -> Group:
    """The ranks that are to restore together: those of torch.distributed, or this process alone."""
    import torch.distributed as dist

    node = node_of(root)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchGroup(node, clock, timeout_s=timeout_s)
    return SingleGroup(node)


def node_of(root: Path) -> str:
    """Names the node: its host, boot, and memory tier (simulated nodes share the first two)."""
    facts = os.stat(root)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "?"
    return f"{socket.gethostname()}/{boot}/{facts.st_dev}/{facts.st_ino}"


def agree(group: Group, error: Exception | None) -> None:
    """Lets all ranks fail together.

    Raises:
        Exception: On every rank, the error of the lowest rank that brought one.
    """
    raise_first(group.all_gather(portable(error, group.rank)), error)


def raise_first(errors: Iterable[Exception | None], own: Exception | None = None) -> None:
    """Raises the first error that some rank brought, if any did.

    Args:
        errors: What each rank brought, by rank.
        own: What this rank brought, which then is the cause that a traceback shows.
    """
    for theirs in errors:
        if theirs is not None:
            if theirs is own or own is None:
                raise theirs
            raise theirs from own


def portable(error: Exception | None, rank: int) -> TieredCheckpointError | None:
    """The same error where it survives a pickle; its text where it may not."""
    if error is None or isinstance(error, TieredCheckpointError):
        return error
    return RestoreError(f"{type(error).__name__}: {error}", operation="load", rank=rank)
