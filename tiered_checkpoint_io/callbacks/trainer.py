"""Answers of a trainer to its callbacks: its strategy, their places, and one answer or error for all its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import combinations
from typing import Any, TypeVar, cast

import fsspec
import torch
from fsspec import AbstractFileSystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from tiered_checkpoint_io.engine.ranks.coordination import portable, raise_first
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.retention import Best, Policies, policies_from

_T = TypeVar("_T")

#: Lightning's strategies that write or read shards themselves, and the advice for each.
_BYPASSING = {
    "FSDPStrategy": "use tiered_checkpoint_io.strategies.TieredFSDPStrategy",
    "ModelParallelStrategy": "use tiered_checkpoint_io.strategies.TieredModelParallelStrategy",
    "DeepSpeedStrategy": "train with TieredFSDPStrategy or TieredModelParallelStrategy of"
    " tiered_checkpoint_io.strategies; DeepSpeed's engine writes its shards itself",
    "XLAStrategy": "train on one device or with DDP; XLA's strategies take no checkpoint IO but their own",
}
_HINT = "give one of them a filename of its own, such as 'best-{epoch}-{step}', or a dirpath below the IO's"
_LAST_HINT = "set save_last for one of them alone, or give one a dirpath below the IO's"


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


def refuse_nemo_averages(trainer: Trainer) -> None:
    """Raises ConfigError for NeMo's EMA: it resumes only from a second file, x-EMA.ckpt, beside each checkpoint."""
    if any(hasattr(each, "save_ema_model") for each in of_classes(trainer, "EMA")):
        raise ConfigError("NeMo's EMA is not supported", operation="setup", hint="leave exp_manager.ema out")


def of_classes(trainer: Trainer, *names: str) -> list[Any]:
    """Returns the callbacks of classes with these names, or derived from them: not every release has the classes."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if any(kind.__name__ in names for kind in type(each).__mro__)]


@contextlib.contextmanager
def trained_weights(trainer: Trainer) -> Iterator[None]:
    """Exchanges the averaged weights of a validation, by their callbacks, for the trained ones in the block."""
    averaging = of_classes(trainer, "WeightAveraging")
    for each in reversed(averaging):
        each.on_validation_epoch_end(trainer, trainer.lightning_module)
    try:
        yield
    finally:
        for each in averaging:
            each.on_validation_epoch_start(trainer, trainer.lightning_module)


# ------------------------------------------------------------------------------------------ places
def folder_of(dirpath: Any, root: str) -> str | None:
    """Returns the folder that a callback's dirpath means: the IO's if it has none, None if it is not below that."""
    if not dirpath:
        return root
    text = str(dirpath)
    return ids.normalize_dirpath(text) if is_below(f"{text.rstrip('/')}/x", root) else None


def check_dirpath(trainer: Trainer, dirpath: str, root: str) -> None:
    """Raises ConfigError for a dirpath that is not below the IO's, or differs between ranks; all ranks call this."""
    if not trainer.strategy.reduce_boolean_decision(dirpath == trainer.strategy.broadcast(dirpath)):
        raise ConfigError(
            f"dirpath differs between ranks; here it is {dirpath!r}",
            hint="it must not depend on the rank or the time of day",
        )
    if not is_below(f"{dirpath}/x", root):
        raise ConfigError(
            f"the callback's dirpath {dirpath!r} is not below the IO's {root!r}",
            hint="leave the callback's dirpath out",
        )


def check_places(callbacks: Iterable[ModelCheckpoint], root: str) -> None:
    """Raises ConfigError for two callbacks that would save to the same names.

    Two with different monitors may have one pattern, if names that are taken get a version.
    """
    for one, other in combinations(callbacks, 2):
        folder = folder_of(one.dirpath, root)
        if folder is None or folder != folder_of(other.dirpath, root):
            continue
        versions = one._enable_version_counter and other._enable_version_counter and one.monitor != other.monitor
        if one.save_top_k and other.save_top_k and _pattern(one) == _pattern(other) and not versions:
            _refuse(one, other, folder, _pattern(one), _HINT)
        if one.save_last and other.save_last and one.CHECKPOINT_NAME_LAST == other.CHECKPOINT_NAME_LAST:
            _refuse(one, other, folder, one.CHECKPOINT_NAME_LAST, _LAST_HINT)


def check_retention(callbacks: Iterable[ModelCheckpoint], policies: Policies | None) -> None:
    """Raises ConfigError for a callback that keeps its best, which the policies would remove."""
    known = [each for each in policies_from(policies) if isinstance(each, Best)]
    for callback in callbacks:
        if not policies or callback.monitor is None or callback.save_top_k == 0:
            continue
        count = max(1, callback.save_top_k)
        same = [each for each in known if (each.metric, each.mode) == (callback.monitor, callback.mode)]
        if not any(each.best >= count for each in same):
            policy = f"{{best: {count}, metric: {callback.monitor}, mode: {callback.mode}}}"
            raise ConfigError(
                f"{callback.state_key} keeps its best {count}, which no policy of retention keeps",
                operation="setup",
                hint=f"add {policy} to retention, or leave monitor out",
            )


def _pattern(callback: ModelCheckpoint) -> str:
    return callback.filename or f"{{epoch}}{callback.CHECKPOINT_JOIN_CHAR}{{step}}"


def _refuse(one: ModelCheckpoint, other: ModelCheckpoint, folder: str, name: str, hint: str) -> None:
    path = ids.join_url(folder, name) + one.FILE_EXTENSION
    raise ConfigError(f"{one.state_key} and {other.state_key} both save to {path}", operation="setup", hint=hint)


class SentinelFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Holds one file, with a present time: the sentinel for the newest "last" checkpoint.

    Lightning resolves ``ckpt_path="last"`` on every rank, by asking the file system of each candidate whether it exists
    and when it was written. This file system answers without a request; at the load, rank 0 finds the checkpoint.
    """

    LAST = ids.LAST_URL
    protocol = "tiered"

    def exists(self, path: str, **_: Any) -> bool:
        return bool(self._strip_protocol(path) == self._strip_protocol(self.LAST))

    def modified(self, path: str) -> datetime:  # noqa: ARG002
        return datetime.now(timezone.utc)


fsspec.register_implementation("tiered", SentinelFileSystem, clobber=True)
