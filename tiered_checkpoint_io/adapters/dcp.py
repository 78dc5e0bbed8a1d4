"""Checkpoints of a job's ranks: ``save``, ``async_save`` and ``load``.

Sharded ones go through torch.distributed.checkpoint (DCP); in local ones each rank saves its own state.
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from tiered_checkpoint_io.adapters.async_saves import AsyncSave, maybe_finalize_async_calls, register, show_failures
from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.adapters.full_state import save_full
from tiered_checkpoint_io.adapters.planners import save_planner
from tiered_checkpoint_io.adapters.smp import load_local_state, place_of, rank_in_group, save_local_state
from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.engine.restore.search import DAMAGE
from tiered_checkpoint_io.engine.save.uncoordinated import LocalSave, Place
from tiered_checkpoint_io.errors import (
    ConfigError,
    InvalidNameError,
    RestoreError,
    TieredCheckpointError,
    UsageError,
)

__all__ = [
    "AsyncSave",
    "TieredStorageReader",
    "TieredStorageWriter",
    "async_save",
    "load",
    "maybe_finalize_async_calls",
    "save",
    "save_full",
]

Kind = Literal["sharded", "local"]

#: More damaged checkpoints than this in a row are no accident.
_MAX_ATTEMPTS = 64
_NO_DIST = "torch.distributed is disabled, unavailable or uninitialized"


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: TieredStorageWriter | None = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    coordinator_rank: int | None = None,
    kind: Kind = "sharded",
    replication_group: Any = None,
    **options: Any,
) -> Metadata | SaveReport | None:
    """Saves a checkpoint of all ranks through both tiers.

    ``sharded``: as ``torch.distributed.checkpoint.save`` does; any number of ranks can load it.
    ``local``: each rank what it has of the state, as one file, without any collective; as many shards
    have to load it.

    Args:
        state_dict: The state; what training does to it after the call is not in the checkpoint. Of kind
            ``local``: anything that can be pickled; of DTensors and ShardedTensors the rank's own part.
        checkpoint_id: Its name, path or URL; the same on all ranks.
        storage_writer: The writer; by default one made from ``options``.
        planner: As DCP takes it, for ``sharded`` alone; by default one that plans once what stays the same.
        process_group: As DCP takes it. Of kind ``local``: the ranks that have one shard each; all by default.
        no_dist: As DCP takes it.
        coordinator_rank: The global rank of the group's member that coordinates; the first by default. Of
            kind ``local``: the rank of ``replication_group`` that saves.
        kind: ``sharded`` or ``local``.
        replication_group: Of kind ``local``: the ranks that hold the same as this one, as a process group
            or as global ranks. Only one of them saves, the lowest by default.
        options: As :class:`TieredStorageWriter` takes them.

    Returns:
        Of kind ``sharded`` the metadata, of kind ``local`` what this rank saved. None where the save failed
        and ``on_save_error`` is ``warn``, and where another rank of the replication group saves.

    Raises:
        TieredCheckpointError: The save failed, or an earlier asynchronous one did, and ``on_save_error`` is
            ``raise``: of kind ``sharded`` the lowest failing rank's error, on all ranks; of kind ``local`` on
            this rank alone.
        CheckpointException: A ``sharded`` save failed in DCP itself or in the user's own code, likewise.
        UsageError: Arguments that do not go together.
    """
    writer = storage_writer or TieredStorageWriter(**options)
    if _is_local(kind, planner, replication_group):
        show_failures()
        place = _place(process_group, replication_group, coordinator_rank, no_dist)
        done = _save_local(state_dict, writer, place, checkpoint_id, None if no_dist else (process_group,))
        return done.report if done is not None else None
    coordinator = 0 if no_dist else rank_in_group(process_group, coordinator_rank)
    if planner is None:
        what = f"{writer.settings.config.namespace}/{coordinator}"
        planner = save_planner(what, process_group, alone=no_dist)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NO_DIST)
            if coordinator:
                return _save_by(coordinator, state_dict, checkpoint_id, writer, planner, process_group)
            metadata: Metadata = state_dict_saver.save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
            )
        return metadata
    except CheckpointException as error:
        if writer.settings.config.on_save_error == "raise":
            # All ranks are told of the same failures. DCP's exception is not one that `except Exception` handles.
            first = error.failures[min(error.failures)][0] if error.failures else None
            if isinstance(first, TieredCheckpointError):
                raise first from error
            raise
        writer.session.log.exception("training goes on without checkpoint %s", checkpoint_id or writer.checkpoint_id)
        return None


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: TieredStorageWriter | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    coordinator_rank: int | None = None,
    kind: Kind = "sharded",
    replication_group: Any = None,
    planner: Any = None,
    **options: Any,
) -> AsyncSave:
    """Saves as :func:`save` does, and returns once the state is captured in node memory.

    That takes hardly longer than copying the tensors once, because they go straight to where the
    upload reads them. Of kind ``sharded``, each rank then hashes its part in the background, at several gigabytes
    a second and thread, and commits it in memory; a process that is killed meanwhile leaves the checkpoint before
    as the newest. What memory has no room for goes straight to the durable tier, in the background as well, from a
    copy that this process keeps; the next save waits for that.

    A failure on the way to the durable tier is shown once: by the future, where it is asked, by
    :func:`maybe_finalize_async_calls`, or at the next save, whatever comes first.

    Args:
        state_dict: The state.
        checkpoint_id: As :func:`save` takes it, like all other arguments.
        storage_writer: The writer.
        process_group: The ranks that save.
        no_dist: Whether this process saves alone.
        coordinator_rank: Who coordinates.
        kind: ``sharded`` or ``local``.
        replication_group: Who holds the same.
        planner: DCP's.
        options: As :class:`TieredStorageWriter` takes them.

    Returns:
        A future of what :func:`save` gives: done once the checkpoint is on the durable tier, if it is to go
        there, else once it is whole in memory; on ranks other than the coordinator (``local``: shard 0), once
        this rank's part is. It holds the exception of a save that did not get there, whatever
        ``on_save_error`` says.
    """
    writer = storage_writer or TieredStorageWriter(**options)
    is_local = _is_local(kind, planner, replication_group)
    sealing: Future[None] | None = None
    op_id: str | None = None
    if is_local:
        show_failures()
        place = _place(process_group, replication_group, coordinator_rank, no_dist)
        ranks = None if no_dist else (process_group,)
        done = _save_local(state_dict, writer, place, checkpoint_id, ranks, background=True)
        saved: Any = None
        if done is not None:
            saved, sealing, op_id = done.report, done.ending, done.op_id
    else:
        before, writer.seals_in_background = writer.seals_in_background, True
        try:
            saved = save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
                coordinator_rank=coordinator_rank,
            )
        finally:
            writer.seals_in_background = before
        if saved is not None:
            writer.seal()
            sealing, op_id = writer.sealing, writer.op_id
    located, session = writer.located, writer.session
    groups = (process_group or _world(), replication_group)
    future = AsyncSave(session, located.name, located.step, tuple(group for group in groups if group is not None))
    register(future)
    if sealing is None and op_id is None:
        future.set_result(saved)
    else:
        future.follow(sealing, op_id, saved)
    return future


def _is_local(kind: str, planner: Any, replication_group: Any) -> bool:
    if kind not in get_args(Kind):
        raise UsageError(f"kind is {kind!r}", operation="call", hint="allowed: 'sharded', 'local'; see also save_full")
    if kind == "local" and planner is not None:
        raise UsageError("a planner for a local checkpoint", operation="call", hint="planners are for kind='sharded'")
    if kind == "sharded" and replication_group is not None:
        raise UsageError(
            "replication_group for a sharded checkpoint",
            operation="call",
            hint="give one replica's sharding group as process_group, and save on its ranks alone",
        )
    return kind == "local"


def _place(process_group: Any, replication_group: Any, coordinator_rank: int | None, no_dist: bool) -> Place:
    return Place() if no_dist else place_of(process_group, replication_group, coordinator_rank)


def _world() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _save_local(
    state_dict: dict[str, Any],
    writer: TieredStorageWriter,
    place: Place,
    checkpoint_id: str | os.PathLike[str] | None,
    ranks: tuple[Any] | None,
    *,
    background: bool = False,
) -> LocalSave | None:
    writer.reset(checkpoint_id)
    session, located = writer.session, writer.located
    session.surface()
    if ranks is not None:
        # The one time that ranks wait for each other, where peers are to keep copies.
        session.meet_peers(ranks[0])
    if not place.writes:
        return None
    try:
        return save_local_state(state_dict, writer, place, checkpoint_id, background=background)
    except (ConfigError, InvalidNameError, UsageError):
        raise
    except Exception as error:
        session.failed(located.name, located.step, error)
        return None


def _save_by(
    coordinator: int,
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    writer: TieredStorageWriter,
    planner: Any,
    process_group: Any,
) -> Metadata:
    """As DCP's ``save``, which has the first rank coordinate."""
    writer.reset(checkpoint_id)
    writer.session.meet_peers(process_group)
    flat = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state_dict.items()}
    metadata: Metadata = state_dict_saver._save_state_dict(
        flat, writer, process_group=process_group, coordinator_rank=coordinator, planner=planner
    )
    return metadata


def _load_by(
    coordinator: int,
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    reader: TieredStorageReader,
    planner: Any,
    process_group: Any,
) -> None:
    """As DCP's ``load``, which has the first rank coordinate."""
    reader.reset(checkpoint_id)
    # The same order on all ranks.
    flat = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in sorted(state_dict.items())}
    state_dict_loader._load_state_dict(
        flat, reader, process_group=process_group, coordinator_rank=coordinator, planner=planner
    )
    for key, loaded in flat.items():
        if isinstance(state_dict[key], Stateful):
            state_dict[key].load_state_dict(loaded)
        else:
            state_dict[key] = loaded


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: TieredStorageReader | None = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    coordinator_rank: int | None = None,
    kind: Kind = "sharded",
    replication_group: Any = None,
    **options: Any,
) -> TieredStorageReader:
    """Loads a checkpoint of all ranks into ``state_dict``.

    ``sharded``: as ``torch.distributed.checkpoint.load`` does. Where a checkpoint shows damage while it
    is read, and it was not asked for by its name, all ranks go on to the next one.
    ``local``: each rank its shard, without any collective; see ``engine/restore/local_restore.py`` for how ranks
    come to load the same.

    Args:
        state_dict: The state to load into. Where an error is raised, it may hold anything.
        checkpoint_id: Its name, path or URL; the newest that is whole, where no step is given.
        storage_reader: The reader; by default one made from ``options``.
        planner: As DCP takes it; for ``sharded`` alone.
        process_group: As :func:`save` takes it.
        no_dist: As DCP takes it.
        coordinator_rank: As :func:`save` takes it; it does not matter for ``local``, where all load.
        kind: As it was saved.
        replication_group: As :func:`save` takes it: all its ranks load the same file.
        options: As :class:`TieredStorageReader` takes them.

    Returns:
        The reader, whose ``opened`` tells which checkpoint it was.

    Raises:
        CheckpointNotFoundError: There is none.
        RestoreError: There are some, but none is intact; or another number of shards made a local one.
        CheckpointException: Anything else that failed on some rank.
    """
    if _is_local(kind, planner, replication_group):
        reader = storage_reader or TieredStorageReader(**options)
        writer = coordinator_rank if replication_group is not None else None
        place = _place(process_group, replication_group, writer, no_dist)
        load_local_state(state_dict, reader, place, checkpoint_id, alone=no_dist)
        return reader
    coordinator = 0 if no_dist else rank_in_group(process_group, coordinator_rank)
    reader = storage_reader or TieredStorageReader(**options)
    for _ in range(_MAX_ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_NO_DIST)
                if coordinator:
                    _load_by(coordinator, state_dict, checkpoint_id, reader, planner, process_group)
                    return reader
                state_dict_loader.load(
                    state_dict,
                    checkpoint_id=checkpoint_id,
                    storage_reader=reader,
                    planner=planner,
                    process_group=process_group,
                    no_dist=no_dist,
                )
            return reader
        except CheckpointException as error:
            if reader.opened is None and isinstance(reader.error, TieredCheckpointError):
                # Nothing could be chosen; all ranks know why.
                raise reader.error from error
            # All ranks are told of the same failures, and so decide alike.
            if not any(isinstance(failure, DAMAGE) for failure, _ in error.failures.values()):
                raise
            reader.reject()
    raise RestoreError(f"{_MAX_ATTEMPTS} checkpoints in a row are damaged", operation="load", key=reader.checkpoint_id)
