"""A sharded state, gathered on one rank and saved as a full checkpoint: for the end of training."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.adapters.groups import rank_in_group, world
from tiered_checkpoint_io.engine.checkpointer import TIERS, Checkpointer
from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.errors import SaveError


def save_full(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str],
    process_group: Any = None,
    coordinator_rank: int | None = None,
    wait: bool = True,
    **options: Any,
) -> SaveReport | None:
    """Gathers a sharded state on one rank, and saves it there as a full checkpoint through both tiers.

    For the end of training: the coordinator needs memory for the whole state, on the CPU. Every rank of
    the group has to call it. The file is one of ``torch.save``: read it by ``torch.load``, or by
    ``TieredCheckpointIO``.

    Args:
        state_dict: The state; DTensors and ShardedTensors are gathered, all else is taken as the
            coordinator has it.
        checkpoint_id: Its name, path or URL; it may do without a step.
        process_group: The ranks that hold the state.
        coordinator_rank: The global rank that gathers and saves; the first of the group by default.
        wait: Whether to return only when it is committed on the durable tier.
        options: As :class:`TieredStorageWriter` takes them.

    Returns:
        On the coordinator, what was saved; None on other ranks.

    Raises:
        SaveError: It was not saved; on all ranks.
        InvalidNameError: The name is not allowed.
    """
    writer = TieredStorageWriter(**options, require_step=False)
    writer.reset(checkpoint_id)
    coordinator = rank_in_group(process_group, coordinator_rank)
    # Told where a rank is by its group alone: the memory tier is the coordinator's business.
    group: coordination.Group = coordination.SingleGroup("")
    if world() is not None:
        group = coordination.GivenGroup("", process_group or world())
    mine = group.rank == coordinator
    report, failed = None, None
    whole = _gather(state_dict, coordinator, keep=mine)
    if mine:
        located, settings = writer.located, writer.settings
        try:
            tiers = TIERS if settings.is_durable(max(0, located.step), writer.save_to_s3) else {"memory"}
            checkpointer = Checkpointer(settings.config, session=writer.session)
            report = checkpointer.save(whole, str(writer.checkpoint_id), tiers=tiers, wait=wait)
        except Exception as error:
            # The others wait to hear of it.
            failed = error
        if report is None and failed is None:
            # Who exports wants to know, whatever on_save_error says of saves while training goes on.
            failed = SaveError(f"{located.name} was not saved: see the log", operation="save", key=writer.checkpoint_id)
    coordination.agree(group, failed)
    return report


def _gather(state: Any, coordinator: int, *, keep: bool) -> Any:
    """The state with whole tensors; None in place of each where it is not kept."""

    def gathered(value: Any) -> Any:
        if isinstance(value, DTensor):
            full = value.full_tensor()
            return full.detach().cpu() if keep else None
        if isinstance(value, ShardedTensor):
            out = torch.empty(value.size(), dtype=value.dtype) if keep else None
            value.gather(coordinator, out)
            return out
        if isinstance(value, Stateful) and not isinstance(value, torch.Tensor | dict):
            return gathered(value.state_dict())
        if isinstance(value, dict):
            return {key: gathered(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(gathered(each) for each in value)
        return value

    return gathered(state)
