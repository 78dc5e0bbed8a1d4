"""Subclasses of NeMo's own callbacks, for checkpoints that are no local files."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from nemo.collections.common.callbacks import EMA
from nemo.utils.callbacks import PreemptionCallback

from tiered_checkpoint_io.adapters.lightning import tiered_io_of
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo.layouts import EMA as SUFFIX


class TieredEMA(EMA):  # type: ignore[misc]
    """NeMo's EMA, which finds its averages beside the checkpoint, on whichever tier."""

    @classmethod
    def like(cls, other: EMA) -> TieredEMA:
        """One with the settings of another."""
        return cls(
            decay=other.decay,
            validate_original_weights=other.validate_original_weights,
            every_n_steps=other.every_n_steps,
            cpu_offload=other.cpu_offload,
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the averages from the file beside the checkpoint; on all ranks.

        Raises:
            CheckpointNotFoundError: There is none.
            RestoreError: It is of another step.
        """
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        restored = io.checkpointer.restored if io is not None else None
        if io is None or restored is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        path = str(trainer.ckpt_path)
        if ids.is_companion(path, SUFFIX):
            # As NeMo has it: the averages are the weights to train on from here.
            return
        # By the name of what was loaded; a path of one rank names its own.
        beside = ids.companion_of(ids.join_url(io.config.dirpath, restored.name), SUFFIX)
        found = io.load_checkpoint(beside)
        # What the run resumed from is the checkpoint, not what lies beside it.
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


class TieredPreemption(PreemptionCallback):  # type: ignore[misc]
    """NeMo's PreemptionCallback, on whichever device the model is."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """Takes the signal."""
        self._device = pl_module.device
        return super().on_train_start(trainer, pl_module)

    @property
    def interrupted(self) -> bool:
        """Whether rank 0 was told to stop; asked of it by all ranks at each batch."""
        told = torch.tensor(self._interrupted, device=self._device, dtype=torch.int32)
        torch.distributed.broadcast(told, 0)
        return bool(told.item())
