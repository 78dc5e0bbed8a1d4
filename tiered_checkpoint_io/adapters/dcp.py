"""Sharded checkpoints through torch.distributed.checkpoint (DCP): ``save``, ``async_save`` and ``load``."""

from __future__ import annotations

import os
import threading
import warnings
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from tiered_checkpoint_io.adapters.dcp_reader import DAMAGE, TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.errors import RestoreError, SaveError, TieredCheckpointError

__all__ = ["TieredStorageReader", "TieredStorageWriter", "async_save", "load", "save"]

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
    **options: Any,
) -> Metadata | None:
    """Saves a sharded checkpoint, as ``torch.distributed.checkpoint.save`` does, through both tiers.

    Args:
        state_dict: The state; what training does to it after the call is not in the checkpoint.
        checkpoint_id: Its name, path or URL.
        storage_writer: The writer; by default one made from ``options``.
        planner: As DCP takes it.
        process_group: As DCP takes it.
        no_dist: As DCP takes it.
        options: As :class:`TieredStorageWriter` takes them.

    Returns:
        None where the save failed on some rank and ``on_save_error`` is ``warn``.

    Raises:
        CheckpointException: It failed, and ``on_save_error`` is ``raise``; on all ranks.
    """
    writer = storage_writer or TieredStorageWriter(**options)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NO_DIST)
            metadata: Metadata = state_dict_saver.save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
            )
        return metadata
    except CheckpointException:
        if writer.settings.config.on_save_error == "raise":
            raise
        writer.session.log.exception("training goes on without checkpoint %s", checkpoint_id or writer.checkpoint_id)
        return None


def async_save(state_dict: dict[str, Any], **arguments: Any) -> Future[Metadata | None]:
    """Saves as :func:`save` does, and returns once the state is captured in node memory.

    That takes hardly longer than copying the tensors once, because they go straight to where the
    upload reads them: nothing is staged, and no thread or process competes with training.

    Args:
        state_dict: The state.
        arguments: As :func:`save` takes them.

    Returns:
        A future of the checkpoint's metadata: done once it is on the durable tier, if it is to go
        there; on ranks other than the coordinator, once this rank's part is. It holds the exception
        of a save that did not get there, whatever ``on_save_error`` says.
    """
    known = ("checkpoint_id", "storage_writer", "planner", "process_group", "no_dist")
    named = {key: arguments.pop(key) for key in known if key in arguments}
    writer: TieredStorageWriter = named.pop("storage_writer", None) or TieredStorageWriter(**arguments)
    future: Future[Metadata | None] = Future()
    metadata = save(state_dict, storage_writer=writer, **named)
    report = writer.last_save
    if metadata is None or report is None or "durable" not in report.tiers:
        future.set_result(metadata)
        return future
    drain, timeout_s = writer.session.open().drain, float(writer.settings.config.wait_timeout_s)
    op_id = writer.op_id

    def wait() -> None:
        try:
            outcome = drain.wait(op_id, timeout_s)
            if outcome.state != "committed":
                raise SaveError(f"{report.name} did not reach the durable tier: {outcome.error}", operation="save")
            future.set_result(metadata)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=wait, name="tiered-async-save", daemon=True).start()
    return future


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: TieredStorageReader | None = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    **options: Any,
) -> TieredStorageReader:
    """Loads a sharded checkpoint into ``state_dict``, as ``torch.distributed.checkpoint.load`` does.

    Where a checkpoint shows damage while it is read, and it was not asked for by its name, all
    ranks go on to the next one.

    Args:
        state_dict: The state to load into. Where an error is raised, it may hold anything.
        checkpoint_id: Its name, path or URL; the newest that is whole, where no step is given.
        storage_reader: The reader; by default one made from ``options``.
        planner: As DCP takes it.
        process_group: As DCP takes it.
        no_dist: As DCP takes it.
        options: As :class:`TieredStorageReader` takes them.

    Returns:
        The reader, whose ``opened`` tells which checkpoint it was.

    Raises:
        CheckpointNotFoundError: There is none.
        RestoreError: There are some, but none is intact.
        CheckpointException: Anything else that failed on some rank.
    """
    reader = storage_reader or TieredStorageReader(**options)
    for _ in range(_MAX_ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_NO_DIST)
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
