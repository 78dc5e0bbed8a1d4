"""Which training steps are saved, and to which tiers (pure)."""

from __future__ import annotations

from tiered_checkpoint_io.errors import ConfigError


def check_every(key: str, value: object) -> None:
    """Refuses what is no interval in training steps.

    Args:
        key: What the error names.
        value: A whole number from 1, or None for never.

    Raises:
        ConfigError: It is neither.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{key} is {value!r}", hint="allowed: a whole number from 1, or None")


def tiers_for_step(
    global_step: int, memory_every_n_train_steps: int | None, s3_every_n_train_steps: int | None
) -> frozenset[str]:
    """The tiers that a training step is saved to: a function of the step alone, so that all ranks agree.

    ``{"memory", "durable"}`` on multiples of ``s3_every_n_train_steps``, else ``{"memory"}`` on
    multiples of ``memory_every_n_train_steps``, else nothing.
    """
    if global_step <= 0:
        return frozenset()
    if s3_every_n_train_steps and global_step % s3_every_n_train_steps == 0:
        return frozenset({"memory", "durable"})
    if memory_every_n_train_steps and global_step % memory_every_n_train_steps == 0:
        return frozenset({"memory"})
    return frozenset()
