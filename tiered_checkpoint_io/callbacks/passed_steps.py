"""Durable steps that a batch passes over: several optimizers, or several calls of one, may make several steps in it."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io.adapters.steps import passes

#: By what ModelCheckpoint, since Lightning 2.6, saves after the validation that gives its metric.
_DEFERS = "_defer_save_until_validation"


def save_passed_step(callback: ModelCheckpoint, trainer: Trainer, before: int) -> None:
    """Saves where this batch has passed over a step that is due.

    Upstream looks only at the step that a batch ends with, which may never be a multiple.

    Args:
        callback: Whose ``every_n_train_steps`` says which steps are due.
        trainer: At the end of the batch, after upstream has looked at it.
        before: The step that the batch before has ended with.
    """
    every, step = callback._every_n_train_steps, trainer.global_step
    is_upstreams = every < 1 or step % every == 0
    if is_upstreams or not passes(every, before, step) or callback._should_skip_saving_checkpoint(trainer):
        return
    candidates = callback._monitor_candidates(trainer)
    if callback.monitor is not None and callback.monitor not in candidates and hasattr(callback, _DEFERS):
        setattr(callback, _DEFERS, True)
        return
    callback._save_topk_checkpoint(trainer, candidates)
    callback._save_last_checkpoint(trainer, candidates)
