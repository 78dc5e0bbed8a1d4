"""Answers of a trainer to its callbacks: its strategy, its steps, and one answer or error for all its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from tiered_checkpoint_io.engine.ranks.coordination import portable, raise_first
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.model import ids

_T = TypeVar("_T")

#: Lightning's strategies that write or read shards themselves, and the advice for each.
_BYPASSING = {
    "FSDPStrategy": "use tiered_checkpoint_io.strategies.TieredFSDPStrategy",
    "ModelParallelStrategy": "use tiered_checkpoint_io.strategies.TieredModelParallelStrategy",
    "DeepSpeedStrategy": "train with TieredFSDPStrategy or TieredModelParallelStrategy of"
    " tiered_checkpoint_io.strategies; DeepSpeed's engine writes its shards itself",
    "XLAStrategy": "train on one device or with DDP; XLA's strategies take no checkpoint IO but their own",
}


def check_strategy(strategy: Strategy) -> None:
    """Raises ConfigError for a strategy that would go past a TieredCheckpointIO."""
    # Known by name: an unused class need not be installed.
    names = [kind.__name__ for kind in type(strategy).__mro__]
    bypassing = [name for name in names if name in _BYPASSING]
    if bypassing and "TieredSharding" not in names:
        raise ConfigError(
            f"{type(strategy).__name__} writes its shards past the checkpoint IO",
            operation="setup",
            hint=_BYPASSING[bypassing[0]],
        )


def is_below(path: str, root: str) -> bool:
    """Returns True for a path of a checkpoint below ``root``."""
    try:
        ids.name_in(root, path)
    except ConfigError:
        return False
    return True


def on_rank_0(trainer: Trainer, work: Callable[[], _T]) -> _T:
    """Returns rank 0's result of ``work`` on every rank; its error is raised on all of them."""
    answer: Any = None
    failed: Exception | None = None
    if trainer.is_global_zero:
        try:
            answer = work()
        except Exception as error:
            failed = error
    answer, raised = trainer.strategy.broadcast((answer, portable(failed, 0)))
    raise_first([raised], failed)
    return cast("_T", answer)


def of_rank_0(trainer: Trainer, metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns rank 0's metrics, on every rank: names and scores are made of them; tensors on the CPU."""
    if trainer.world_size == 1:
        return metrics
    return on_rank_0(trainer, lambda: {name: v.cpu() if torch.is_tensor(v) else v for name, v in metrics.items()})


@contextlib.contextmanager
def failing_together(trainer: Trainer) -> Iterator[None]:
    """Raises a block's error on every rank, the first rank's if several have one; all ranks enter it."""
    error: TieredCheckpointError | None = None
    try:
        yield
    except TieredCheckpointError as caught:
        error = caught
    errors = [error]
    if trainer.world_size > 1:
        errors = [None] * trainer.world_size
        torch.distributed.all_gather_object(errors, error)
    raise_first(errors)


def all_failed(session: Session, group: Any, error: BaseException) -> bool:
    """Returns whether all ranks come here after an exception; logs that of this rank before it waits for them."""
    if isinstance(error, Exception):
        session.log.error("training failed on this rank: %s", error, exc_info=error)
    try:
        torch.distributed.monitored_barrier(group, timedelta(seconds=session.clock.timing.failed_together_s))
    except RuntimeError as lost:
        session.log.error("the ranks do not save together on this exception, because some did not come: %s", lost)
        return False
    return True


def nemo_averages(trainer: Trainer) -> Any:
    """Returns NeMo's EMA callback; None if there is none."""
    return next((each for each in of_classes(trainer, "EMA") if hasattr(each, "save_ema_model")), None)


def of_classes(trainer: Trainer, *names: str) -> list[Any]:
    """Returns the callbacks of classes with these names, or derived from them: not every release has the classes."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if any(kind.__name__ in names for kind in type(each).__mro__)]


@contextlib.contextmanager
def trained_weights(trainer: Trainer) -> Iterator[None]:
    """Exchanges the averaged weights of a validation, by their callbacks, for the trained ones in the block."""
    averaging = of_classes(trainer, "WeightAveraging")
    ema = nemo_averages(trainer)
    for each in reversed(averaging):
        each.on_validation_epoch_end(trainer, trainer.lightning_module)
    if ema is not None:
        ema.on_validation_end(trainer, trainer.lightning_module)
    try:
        yield
    finally:
        if ema is not None:
            ema.on_validation_start(trainer, trainer.lightning_module)
        for each in averaging:
            each.on_validation_epoch_start(trainer, trainer.lightning_module)
