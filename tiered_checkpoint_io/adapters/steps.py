"""Which steps go to which tier, and what they are called, where a training loop is not Lightning's Trainer (pure)."""

from __future__ import annotations

from collections.abc import Collection

from tiered_checkpoint_io.engine.checkpointer import TIERS
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def tiers_at(step: int, config: TieredCheckpointConfig) -> Collection[str]:
    """The tiers that a step goes to: none, memory alone, or both."""

    def is_due(every: int | None) -> bool:
        return every is not None and step > 0 and step % every == 0

    if is_due(config.s3_every_n_train_steps):
        return TIERS
    return frozenset({"memory"}) if is_due(config.memory_every_n_train_steps) else frozenset()


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step={step}.ckpt"
