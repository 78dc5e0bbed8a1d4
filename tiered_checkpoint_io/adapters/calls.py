"""Calls of DCP's functions and of ours: the ranks that take part, and asynchronous saves, whose failures show once."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tiered_checkpoint_io.adapters.planner import CheckingSavePlanner
from tiered_checkpoint_io.engine.drain.status import say_outcome
from tiered_checkpoint_io.engine.ranks.run import current_run
from tiered_checkpoint_io.engine.save.facts import ShardRole
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, DrainError, SaveError, TieredCheckpointError
from tiered_checkpoint_io.model import ids

#: Earlier releases keep a rank's plan also if the save then fails, and lose its items from the next one.
_KEEPS_WHAT_SUCCEEDED = "_pending_local_plan" in DefaultSavePlanner.finish_plan.__code__.co_names


def world() -> Any:
    """Returns the process group of all ranks; None without torch.distributed."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class DcpArguments(NamedTuple):
    """Arguments of DCP's functions that it does not pass to a writer or reader."""

    #: True if only this process takes part.
    alone: bool
    #: The ranks that take part.
    process_group: Any
    #: True if DCP's ``async_save`` saves, in a thread or process of its own.
    in_background: bool


class Ranks(NamedTuple):
    """The ranks that save or load together, as a caller of :func:`tiered_checkpoint_io.dcp.save` names them."""

    process_group: Any = None
    replication_group: Any = None
    coordinator_rank: int | None = None
    no_dist: bool = False

    @property
    def are_alone(self) -> bool:
        """True if this process saves or loads without others."""
        return self.no_dist or world() is None

    @property
    def coordinator(self) -> int:
        """The coordinator's rank in its group, as DCP wants it; no other rank is asked.

        A global rank of the group counts as such, as in SMP and torch.distributed; any other as a rank in the group, as
        in DCP.
        """
        coordinator = self.coordinator_rank
        if coordinator is None or self.are_alone:
            return 0
        ranks = dist.get_process_group_ranks(self.process_group or world())
        if coordinator in ranks:
            return ranks.index(coordinator)
        if 0 <= coordinator < len(ranks):
            return coordinator
        raise ConfigError(
            f"coordinator_rank is {coordinator}, the process group has ranks {ranks}",
            operation="save",
            hint="give the global rank of a member of the group",
        )

    def shard_role(self) -> ShardRole:
        """Returns this rank's shard of a local checkpoint, and if this rank saves the shard; asks no other rank.

        The process group holds one state among its ranks, each another shard. With a replication group, the default is
        the ranks with this rank's place in their groups; ``coordinator_rank`` is then the global rank that saves.
        """
        process_group, replication_group, writer = self[:3]
        if self.are_alone:
            return ShardRole()
        if process_group is not None and not ranks_of(process_group):
            raise ConfigError(
                "this rank is not in the process group",
                operation="save",
                rank=dist.get_rank(),
                hint="only the ranks of a sharding group save and load by it: give each rank the group that it is in",
            )
        if replication_group is None:
            if writer is not None:
                raise ConfigError(
                    "coordinator_rank without replication_group",
                    operation="save",
                    hint="in a local checkpoint it says which rank of a replication group saves: give that group as"
                    " replication_group=, and the sharding group, if any, as process_group=",
                )
            return ShardRole(dist.get_rank(process_group), dist.get_world_size(process_group))
        rank = dist.get_rank()
        ranks = list(ranks_of(replication_group))
        saves = min(ranks, default=rank) if writer is None else writer
        if rank not in ranks or saves not in ranks:
            raise ConfigError(
                f"the replication group has ranks {ranks}, not {rank if rank not in ranks else saves}",
                operation="save",
                rank=rank,
                hint="each rank gives the group that it is in, and coordinator_rank as a global rank of it",
            )
        if process_group is not None:
            return ShardRole(dist.get_rank(process_group), dist.get_world_size(process_group), rank == saves)
        shard, degree = _in_regular_layout(ranks)
        return ShardRole(shard, degree, rank == saves)


def dcp_arguments(*functions: str) -> DcpArguments | None:
    """Returns the arguments of the DCP function that calls us; None if none does.

    Without ``no_dist`` we would wait for ranks that never come, with a process group for ranks that have no part in it.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in functions and module.startswith("torch.distributed.checkpoint."):
            alone = frame.f_locals.get("no_dist", False) or world() is None
            return DcpArguments(alone, frame.f_locals.get("process_group"), _is_in_background(frame))
        frame = frame.f_back
    return None


def _is_in_background(frame: Any) -> bool:
    module = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.distributed.checkpoint._async_") or not module.startswith("torch."):
            break
        frame = frame.f_back
    # Earlier releases hand `save` itself to a pool of threads.
    return module.startswith("torch.") or module == "concurrent.futures.thread"


def first_failure(error: CheckpointException) -> tuple[list[int], BaseException]:
    """Returns the ranks that failed, and the failure of the lowest one; equal on all ranks.

    Raises the interrupt of a rank (Ctrl-C, a signal handler that exits), which DCP takes for an ordinary failure.
    """
    ranks = sorted(error.failures)
    failures = [error.failures[rank][0] for rank in ranks]
    for failure in failures:
        if not isinstance(failure, Exception | CheckpointException):
            raise failure from error
    return ranks, failures[0] if failures else error


def as_save_error(error: Exception) -> TieredCheckpointError:
    """Makes an error of the state's own code one that survives a pickle, on its way to the other ranks."""
    if isinstance(error, TieredCheckpointError):
        return error
    failed = SaveError(f"{type(error).__name__}: {error}", operation="save")
    failed.__cause__ = error
    return failed


def save_planner(what: str, process_group: Any = None, *, alone: bool = False) -> DefaultSavePlanner:
    """Returns a planner that plans once the parts that are equal in all saves of ``what``.

    A rank and its coordinator have to keep plans of the same saves. DCP tells plans apart by the planner's class only:
    two groups of ranks, or processes that restarted as other ranks, would take each other's plans, and save too little.
    """
    if not _KEEPS_WHAT_SUCCEEDED:
        return CheckingSavePlanner()
    planner = CheckingSavePlanner(enable_plan_caching=True)
    together = "alone"
    if not alone and world() is not None:
        together = ",".join(map(str, dist.get_process_group_ranks(process_group or world())))
    planner._cached_plans_key = f"tiered/{current_run().number}/{what}/{together}"
    return planner


def ranks_of(group: Any) -> tuple[int, ...]:
    """Returns the global ranks of a process group, or given ranks, sorted; none of a group without this rank."""
    if isinstance(group, Sequence) and not isinstance(group, str):
        return tuple(sorted({int(each) for each in group}))
    return () if group == dist.GroupMember.NON_GROUP_MEMBER else tuple(sorted(dist.get_process_group_ranks(group)))


def _in_regular_layout(ranks: list[int]) -> tuple[int, int]:
    """Returns the shard and the shard degree of a replication group, if all such groups lie as in a mesh."""
    count, size = dist.get_world_size(), len(ranks)
    stride = ranks[1] - ranks[0] if size > 1 else 1
    regular = ranks == list(range(ranks[0], ranks[0] + stride * size, stride))
    outer, inner = divmod(ranks[0], stride * size)
    if not regular or inner >= stride or count % (stride * size):
        raise ConfigError(
            f"the replication group {ranks} of {count} ranks does not say which shard it has",
            operation="save",
            hint="give the sharding group as process_group=",
        )
    return outer * stride + inner, count // size


#: Number of ended saves that are kept for a caller that may ask for them.
_KEPT = 32


class AsyncSave(Future[Any]):
    """A future of one save: done once the checkpoint is durable, or in memory if it is memory-only.

    Attributes:
        name: The checkpoint's name.
        step: Its training step; -1 if it is not known.
        groups: The global ranks of each group that takes part in the save, sorted.
        shown: True if its failure, if any, was logged, raised, or returned.
    """

    def __init__(self, session: Session, name: str, step: int, groups: tuple[Any, ...] = ()) -> None:
        """Takes the groups that take part as process groups, or as global ranks."""
        super().__init__()
        self.name = name
        self.step = step
        self.groups = tuple(map(ranks_of, groups))
        self.shown = False
        self._session = session
        # The save continues even if its waiter is cancelled, as asyncio does.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the save's end, and returns its result, or raises its failure."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the failure of the save, once it has ended; None if there is none."""
        error = super().exception(timeout)
        self.shown |= error is not None
        return error

    @property
    def bound_s(self) -> float:
        """Seconds to wait for it: the save ends by ``wait_timeout_s`` itself, and reports a little later."""
        return float(self._session.config.support.wait_timeout_s) + self._session.clock.timing.future_slack_s

    def follow(self, sealing: Future[str | None] | None, op_id: str | None, value: Any) -> None:
        """Ends, with ``value`` or an error, once this rank's part is sealed and the drain's operation has ended.

        ``sealing`` is the task that seals the part and returns the operation; ``op_id`` is that of a sealed part.
        """
        if sealing is None and op_id is None:
            self.set_result(value)
            return

        def wait() -> None:
            try:
                uploads = op_id if sealing is None else sealing.result(self._session.config.support.wait_timeout_s)
                if uploads is not None:
                    self._wait_for(uploads)
                self.set_result(value)
            except BaseException as error:
                self.set_exception(error)

        threading.Thread(target=wait, name="tiered-async-save", daemon=True).start()

    def _wait_for(self, op_id: str) -> None:
        session = self._session
        outcome = session.open().drain.wait(op_id, float(session.config.support.wait_timeout_s))
        if outcome.state != "committed":
            given_up = "it is given up, and not tried again"
            raise SaveError(
                f"{self.name} did not reach the durable tier: {outcome.error}",
                operation="save",
                tier="durable",
                key=session.dirpath,
                step=ids.known(self.step),
                hint=given_up if outcome.state == "skipped" else "it stays in node memory and is tried again",
            )
        say_outcome(session.log, outcome, session.config)

    def show(self) -> SaveError | None:
        """Logs and counts a failure that was not shown yet; returns it if ``on_save_error`` is ``raise``."""
        error = super().exception(0) if self.done() and not self.shown else None
        if error is None:
            return None
        self.shown = True
        failure = error if isinstance(error, Exception) else SaveError(str(error), operation="save")
        try:
            # The rank that it began on has noted it there, or its drain has.
            self._session.failed(self.name, self.step, failure, shared=True)
        except SaveError as raised:
            return raised
        return None


_lock = threading.Lock()
_saves: list[AsyncSave] = []


def register(save: AsyncSave) -> None:
    """Takes note of a save that has begun."""
    with _lock:
        _saves.append(save)
        ended = [each for each in _saves if each.done()]
        for each in ended[: max(0, len(ended) - _KEPT)]:
            _saves.remove(each)


def show_failures() -> None:
    """Shows failures of saves that have ended, each once; raises the first if ``on_save_error`` is ``raise``."""
    with _lock:
        saves = list(_saves)
    _show(saves)


def _show(saves: Iterable[AsyncSave]) -> None:
    # All are logged and counted, one can be raised.
    failures = [failure for save in saves if (failure := save.show()) is not None]
    if failures:
        raise failures[0]


def was_shown(error: BaseException | None) -> None:
    """Takes note that this failure was shown."""
    with _lock:
        for save in _saves:
            save.shown |= error is not None and save.done() and Future.exception(save) is error


def maybe_finalize_async_calls(blocking: bool = False, process_group: Any = None) -> list[AsyncSave]:
    """Collects the asynchronous saves of this process that have ended, and shows each failure once.

    Args:
        blocking: True to wait for the others, each within the ``wait_timeout_s`` of its configuration.
        process_group: Only saves in which these ranks took part, as process group or replication group: a process
            group, or global ranks. None for all saves.

    Returns:
        The saves that have ended since the last call, in the order of their beginning.

    Raises:
        SaveError: A save failed, and ``on_save_error`` is ``raise``.
        DrainError: A save has not ended in time.
    """
    ranks = None if process_group is None else ranks_of(process_group)
    with _lock:
        mine = [save for save in _saves if ranks is None or ranks in save.groups]
    if blocking and mine:
        bound = max(save.bound_s for save in mine)
        _, late = concurrent.futures.wait(mine, bound)
        if late:
            names = ", ".join(sorted(save.name for save in mine if save in late))
            raise DrainError(f"saves have not ended within {bound:.0f} s: {names}", operation="finalize")
    ended = [save for save in mine if save.done()]
    with _lock:
        _saves[:] = [save for save in _saves if save not in ended]
    _show(ended)
    return ended
