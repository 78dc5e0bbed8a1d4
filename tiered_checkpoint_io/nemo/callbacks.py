"""NeMo's EMA and preemption callbacks, for checkpoints that are not local files."""

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
    """NeMo's EMA; loads its averages from the file beside the checkpoint, from any tier."""

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
        """Loads the averages; on all ranks.

        Raises:
            CheckpointNotFoundError: The file is missing.
            RestoreError: It is of another step.
        """
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        restored = io.checkpointer.restored if io is not None else None
        if io is None or restored is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        if ids.is_companion(str(trainer.ckpt_path), SUFFIX):
            # As NeMo does it: training continues with the averages as weights.
            return
        # From the name that was loaded: with files of each rank, each has averages of its own.
        beside = ids.companion_of(ids.join_url(io.config.dirpath, restored.name), SUFFIX)
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


class TieredPreemption(PreemptionCallback):  # type: ignore[misc]
    """NeMo's PreemptionCallback, which needs CUDA, for any device."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """Installs the signal handler."""
        self._device = pl_module.device
        return super().on_train_start(trainer, pl_module)

    @property
    def interrupted(self) -> bool:
        """Whether rank 0 got the signal; all ranks ask at each batch."""
        interrupted = torch.tensor(self._interrupted, device=self._device, dtype=torch.int32)
        torch.distributed.broadcast(interrupted, 0)
        return bool(interrupted.item())
