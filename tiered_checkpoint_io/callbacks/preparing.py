"""Room for a training's first save, made after its first step: at the save itself it would take longer."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.adapters.sizes import size_here


class FirstSave:
    """Prepares the first save of a training, once."""

    def __init__(self) -> None:
        self._is_due = False
        self._began_at = 0

    def begin(self, trainer: Trainer) -> None:
        """Takes note of a training that begins or resumes."""
        shards: bool | None = getattr(trainer.strategy, "_saves_shards", None)
        # Strategies that train shards, and save them as one file, do not show how large that is.
        writes = shards if shards is not None else trainer.is_global_zero
        self._began_at = trainer.global_step
        self._is_due = writes and saves_by(trainer.checkpoint_callbacks, trainer.global_step, _last_step(trainer))

    def reach(self, trainer: Trainer, io: TieredCheckpointIO) -> None:
        """Prepares, once a step is done: the optimizers have their states, and what training needs is in memory."""
        if self._is_due and trainer.global_step > self._began_at:
            self._is_due = False
            io.checkpointer.prepare(size_here(trainer.lightning_module, trainer.optimizers))


def saves_by(callbacks: Iterable[Callback], step: int, last_step: float) -> bool:
    """Whether any of a trainer's checkpoint callbacks saves after ``step``, as far as their intervals tell."""

    def reaches(interval: int) -> bool:
        return (step // interval + 1) * interval <= last_step

    for each in callbacks:
        memory: int | None = getattr(each, "memory_every_n_train_steps", None)
        if memory and reaches(memory):
            return True
        if not isinstance(each, ModelCheckpoint):
            return True
        if each.save_top_k != 0 or each.save_last:
            interval = each._every_n_train_steps
            if not interval or reaches(interval):
                return True
    return False


def _last_step(trainer: Trainer) -> float:
    return trainer.max_steps if trainer.max_steps >= 0 else float("inf")
