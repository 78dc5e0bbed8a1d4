"""What callbacks ask of a trainer: its strategy, its steps, and one answer or error for all its ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from tiered_checkpoint_io.engine.ranks.coordination import portable, raise_first
from tiered_checkpoint_io.errors import ConfigError, InvalidNameError, TieredCheckpointError, UsageError
from tiered_checkpoint_io.model import ids

_T = TypeVar("_T")

#: Lightning's strategies that write or read shards themselves, and what to take in their place.
_BYPASSING = {
    "FSDPStrategy": "use tiered_checkpoint_io.strategies.TieredFSDPStrategy",
    "ModelParallelStrategy": "use tiered_checkpoint_io.strategies.TieredModelParallelStrategy",
    "DeepSpeedStrategy": "train with TieredFSDPStrategy or TieredModelParallelStrategy of"
    " tiered_checkpoint_io.strategies; DeepSpeed's engine writes its shards itself",
    "XLAStrategy": "train on one device or with DDP; XLA's strategies take no checkpoint IO but their own",
}


def check_strategy(strategy: Strategy) -> None:
    """Refuses a strategy that would go past a TieredCheckpointIO.

    Raises:
        UsageError: It does.
    """
    # Known by name: what is not used need not be installed.
    names = [kind.__name__ for kind in type(strategy).__mro__]
    bypassing = [name for name in names if name in _BYPASSING]
    if bypassing and "TieredSharding" not in names:
        raise UsageError(
            f"{type(strategy).__name__} writes its shards past the checkpoint IO",
            operation="setup",
            hint=_BYPASSING[bypassing[0]],
        )


def is_below(path: str, root: str) -> bool:
    """Whether a path is that of a checkpoint below ``root``."""
    try:
        ids.name_in(root, path)
    except InvalidNameError:
        return False
    return True


def on_rank_0(trainer: Trainer, work: Callable[[], _T]) -> _T:
    """What ``work`` returns on rank 0, on every rank; its error is raised on all of them."""
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
    """Rank 0's metrics, on every rank; tensors on the CPU.

    Names and scores are made of them, and what ranks do together hangs on these: of a metric that is not synchronised,
    each rank has another value.
    """
    if trainer.world_size == 1:
        return metrics
    return on_rank_0(
        trainer,
        lambda: {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()},
    )


def fail_together(trainer: Trainer, error: TieredCheckpointError | None) -> None:
    """Raises the error of the first rank that has one, on every rank; all ranks call this."""
    errors = [error]
    if trainer.world_size > 1:
        errors = [None] * trainer.world_size
        torch.distributed.all_gather_object(errors, error)
    raise_first(errors)


@contextlib.contextmanager
def failing_together(trainer: Trainer) -> Iterator[None]:
    """A block whose error is raised on every rank, whichever of them has one; all ranks enter it."""
    error: TieredCheckpointError | None = None
    try:
        yield
    except TieredCheckpointError as caught:
        error = caught
    fail_together(trainer, error)


def save_together(trainer: Trainer, filepath: str, options: dict[str, Any], *, weights_only: bool) -> None:
    """Saves on all ranks, or raises the same error on all."""
    error: TieredCheckpointError | None = None
    try:
        trainer.save_checkpoint(filepath, weights_only, storage_options=options)
    except TieredCheckpointError as caught:
        error = caught
        if trainer.world_size > 1:
            # The other ranks wait in the barrier by which Trainer.save_checkpoint ends.
            trainer.strategy.barrier("Trainer.save_checkpoint")
    fail_together(trainer, error)


def save_training(trainer: Trainer, filepath: str, options: dict[str, Any]) -> None:
    """Saves all that the training resumes from: a callback that saves more files than one does it, or the trainer."""
    for each in trainer.checkpoint_callbacks:
        save: Any = getattr(each, "save_training", None)
        if save is not None:
            save(trainer, filepath, options)
            return
    trainer.save_checkpoint(filepath, storage_options=options)


def nemo_averages(trainer: Trainer) -> Any:
    """NeMo's EMA callback; None where there is none."""
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        # By name: without NeMo there is no class to import.
        if any(kind.__name__ == "EMA" and hasattr(kind, "save_ema_model") for kind in type(each).__mro__):
            return each
    return None


def of_classes(trainer: Trainer, *names: str) -> list[Any]:
    """The callbacks of classes of these names, or derived from them: not every supported Lightning has them."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if any(kind.__name__ in names for kind in type(each).__mro__)]


@contextlib.contextmanager
def trained_weights(trainer: Trainer) -> Iterator[None]:
    """A block amid a validation, in which the weights are those that are trained.

    Callbacks that validate averaged weights have exchanged them; what is saved so would name each for the other.
    """
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


def if_known(**arguments: Any) -> dict[str, Any]:
    """Arguments of ModelCheckpoint that not every supported Lightning has, as this one takes them.

    Raises:
        ConfigError: It does not know one, and that is not False or None.
    """
    known = inspect.signature(ModelCheckpoint.__init__).parameters
    for name, value in arguments.items():
        if name not in known and value:
            raise ConfigError(
                f"{name} is {value!r}, but lightning {lightning_version} has no such argument of ModelCheckpoint",
                hint=f"leave {name} out, or install a newer lightning",
            )
    return {name: value for name, value in arguments.items() if name in known}
