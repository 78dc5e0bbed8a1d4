"""NeMo's EMA beside a TieredNeMoCheckpoint: a checkpoint's averages are a file beside it, in any tier."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from tiered_checkpoint_io.adapters.io_of import tiered_io_of
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.model import ids


def load_from_beside(ema: Any) -> None:
    """Has NeMo's EMA load its averages from the file beside the checkpoint; may be called any number of times."""
    # On the instance: the class, which may be derived from NeMo's, stays as it was.
    ema.on_load_checkpoint = partial(_load, ema)


def _load(ema: Any, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """In place of the callback's own hook; on all ranks.

    Raises:
        CheckpointNotFoundError: The file is missing.
        RestoreError: It is of another step.
    """
    io = tiered_io_of(trainer.strategy.checkpoint_io)
    restored = io.checkpointer.restored if io is not None else None
    if io is None or restored is None:
        type(ema).on_load_checkpoint(ema, trainer, pl_module, checkpoint)
        return
    if ids.is_companion(str(trainer.ckpt_path), ids.EMA):
        # As NeMo does it: training continues with the averages as weights.
        return
    # From what was loaded: with files of each rank, each has averages of its own.
    beside = ids.companion_of(restored.url, ids.EMA)
    found = io.load_checkpoint(beside)
    # The run resumed from the checkpoint, not from its averages.
    io.checkpointer.restored = restored
    if found.get("global_step") != checkpoint.get("global_step"):
        raise RestoreError(
            f"the averages are of step {found.get('global_step')}, the weights of {checkpoint.get('global_step')}",
            operation="load",
            key=beside,
            step=checkpoint.get("global_step"),
            hint="name another checkpoint to resume from",
        )
    checkpoint["optimizer_states"] = found["optimizer_states"]
