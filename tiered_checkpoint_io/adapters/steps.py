"""Which steps go to which tier, and what they are called where a training loop is not Lightning's Trainer (pure)."""

from __future__ import annotations

from tiered_checkpoint_io.engine.checkpointer import TIERS
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def tiers_for_step(
    global_step: int, memory_every_n_train_steps: int | None, s3_every_n_train_steps: int | None
) -> frozenset[str]:
    """The tiers that a training step is saved to: a function of the step alone, so that all ranks agree.

    ``{"memory", "durable"}`` on multiples of ``s3_every_n_train_steps``, else ``{"memory"}`` on
    multiples of ``memory_every_n_train_steps``, else nothing.

    Args:
        global_step: The optimizer step; 0 is never saved.
        memory_every_n_train_steps: Steps between memory checkpoints; None for none.
        s3_every_n_train_steps: Steps between durable checkpoints; None for none.
    """
    if global_step > 0 and s3_every_n_train_steps and global_step % s3_every_n_train_steps == 0:
        return TIERS
    if global_step > 0 and memory_every_n_train_steps and global_step % memory_every_n_train_steps == 0:
        return frozenset({"memory"})
    return frozenset()


def tiers_due(step: int, config: TieredCheckpointConfig) -> frozenset[str]:
    """:func:`tiers_for_step`, by the intervals of a configuration."""
    return tiers_for_step(step, config.memory_every_n_train_steps, config.s3_every_n_train_steps)


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step={step}.ckpt"
