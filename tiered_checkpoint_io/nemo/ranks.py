"""One answer, or one error, for all ranks of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Trainer

from tiered_checkpoint_io.engine.ranks.coordination import portable
from tiered_checkpoint_io.errors import TieredCheckpointError

_T = TypeVar("_T")


def on_rank_0(trainer: Trainer, work: Callable[[], _T]) -> _T:
    """What ``work`` returns on rank 0, on every rank; its error is raised on all of them."""
    answer: tuple[Any, TieredCheckpointError | None] = None, None
    if trainer.is_global_zero:
        try:
            answer = work(), None
        except Exception as error:
            failed = portable(error, 0)
            if failed is not error and failed is not None:
                failed.__cause__ = error
            answer = None, failed
    result, raised = trainer.strategy.broadcast(answer)
    if raised is not None:
        raise raised
    return cast("_T", result)


def first_error(trainer: Trainer, error: TieredCheckpointError | None) -> TieredCheckpointError | None:
    """The error of the first rank that has one, on every rank."""
    errors = [error]
    if trainer.world_size > 1:
        errors = [None] * trainer.world_size
        torch.distributed.all_gather_object(errors, error)
    return next((each for each in errors if each is not None), None)
