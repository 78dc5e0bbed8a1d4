"""Refuses what would go past the checkpoint IO before it writes anything, and gives ModelCheckpoint its place."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, tiered_io_of
from tiered_checkpoint_io.errors import ConfigError, UsageError

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
    kinds = type(strategy).__mro__
    # Known by name: what is not used need not be installed.
    if any(kind.__name__ == "TieredSharding" for kind in kinds):
        return
    for kind in kinds:
        if kind.__name__ in _BYPASSING:
            raise UsageError(
                f"{type(strategy).__name__} writes its shards past the checkpoint IO",
                operation="setup",
                hint=_BYPASSING[kind.__name__],
            )


def folder_below(trainer: Trainer, io: TieredCheckpointIO, dirpath: Any) -> str:
    """Where a callback saves: the IO's dirpath, or its own below that.

    Raises:
        ConfigError: It is not below the IO's, or differs between ranks.
    """
    root = io.config.dirpath
    folder = root if dirpath is None else str(dirpath)
    if not trainer.strategy.reduce_boolean_decision(folder == trainer.strategy.broadcast(folder)):
        raise ConfigError(
            f"dirpath differs between ranks; here it is {folder!r}",
            hint="it must not depend on the rank or the time of day",
        )
    if folder != root and not folder.startswith(root.rstrip("/") + "/"):
        raise ConfigError(
            f"the callback's dirpath {folder!r} is not below the IO's {root!r}",
            hint="leave the callback's dirpath out",
        )
    return folder


def claim(trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Finds out, before anything is trained, whether another run writes where this one would.

    Raises:
        UsageError: Another one does; on all ranks.
    """
    error = None
    if trainer.is_global_zero:
        try:
            io.checkpointer.session.claim()
        except UsageError as caught:
            error = caught
    error = trainer.strategy.broadcast(error)
    if error is not None:
        raise error


class StrategyGuard(Callback):
    """Looks after any trainer that has our checkpoint IO, whatever its callbacks are.

    A stock sharded strategy never asks its checkpoint IO, and would write to a local folder ``./s3:/``
    without a word: it is refused. Lightning's default ModelCheckpoint would save outside dirpath, which the IO can't:
    it is given its place. Lightning adds this callback to every trainer, by the entry point of this package.
    Where parts have copies in the memory of peers, it also is where the ranks meet.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Refuses what would go past our checkpoint IO; has ranks meet that keep each other's copies.

        Raises:
            UsageError: A strategy does, or a ModelCheckpoint; or there are fewer nodes than ``replication_factor``.
        """
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None:
            return
        check_strategy(trainer.strategy)
        if stage == "fit":
            # The callbacks need this module.
            from tiered_checkpoint_io.callbacks.stock import place_checkpoints

            place_checkpoints(trainer, io)
        if stage == "fit" and io.config.replication_factor > 1:
            # All ranks are here, on their main threads; of a full checkpoint, rank 0 alone saves later.
            io.checkpointer.session.meet_peers()


def guard() -> list[Callback]:
    """What Lightning's entry point ``lightning.pytorch.callbacks_factory`` calls."""
    return [StrategyGuard()]
