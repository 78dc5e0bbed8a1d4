"""Training steps: their tiers, and numbers of steps that a caller gave (pure)."""

from __future__ import annotations

from tiered_checkpoint_io.engine.checkpointer import TIERS
from tiered_checkpoint_io.errors import ConfigError


def tiers_for_step(
    global_step: int,
    memory_every_n_train_steps: int | None,
    s3_every_n_train_steps: int | None,
    *,
    since: int | None = None,
) -> frozenset[str]:
    """Returns the tiers that a training step is saved to: a function of only steps, so that all ranks agree.

    ``{"memory", "durable"}`` on multiples of ``s3_every_n_train_steps``, else ``{"memory"}`` on
    multiples of ``memory_every_n_train_steps``, else none.

    Args:
        global_step: The optimizer step; 0 is never saved.
        memory_every_n_train_steps: Steps between memory checkpoints; None for none.
        s3_every_n_train_steps: Steps between durable checkpoints; None for none.
        since: The step after the previous batch, if not ``global_step - 1``: multiples in between count.
    """
    before = global_step - 1 if since is None else since
    if passes(s3_every_n_train_steps, before, global_step):
        return TIERS
    if passes(memory_every_n_train_steps, before, global_step):
        return frozenset({"memory"})
    return frozenset()


def passes(every: int | None, before: int, step: int) -> bool:
    """Returns whether a multiple of ``every`` comes after ``before``, up to ``step``; None and 0 have none."""
    return every is not None and every > 0 and step > 0 and step // every > before // every


def check_positive(key: str, value: object) -> None:
    """Refuses a value that is neither a whole number from 1 nor None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{key} is {value!r}", hint="allowed: a whole number from 1, or None")
