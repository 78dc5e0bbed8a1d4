"""Refuses what would go past the checkpoint IO before it writes anything, and gives ModelCheckpoint its place."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, tiered_io_of
from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.places import folder_of
from tiered_checkpoint_io.callbacks.trainer import check_strategy
from tiered_checkpoint_io.errors import UsageError


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
            for callback in trainer.checkpoint_callbacks:
                # Classes derived from it are their authors' business.
                if type(callback) is ModelCheckpoint:
                    _place(callback, trainer, io)
        if stage == "fit" and io.config.replication_factor > 1:
            # All ranks are here, on their main threads; of a full checkpoint, rank 0 alone saves later.
            io.checkpointer.session.meet_peers()


def guard() -> list[Callback]:
    """What Lightning's entry point ``lightning.pytorch.callbacks_factory`` calls."""
    return [StrategyGuard()]


def _place(callback: ModelCheckpoint, trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Has Lightning's own ModelCheckpoint save below the IO's dirpath: to its own dirpath there, if it has one.

    It becomes one of ours, in place, because the user may hold it and ask it for its ``best_model_path``. Lightning's
    class could not do it: it looks into a remote folder by a file system of its own.

    Raises:
        UsageError: Its dirpath is elsewhere.
    """
    root, folder = io.config.dirpath, folder_of(callback.dirpath, io.config.dirpath)
    if folder is None:
        raise UsageError(
            f"ModelCheckpoint(dirpath={str(callback.dirpath)!r}) does not save below TieredCheckpointIO's dirpath"
            f" {root!r}",
            operation="setup",
            hint="leave the callback's dirpath out, or name a folder below the IO's",
        )
    TieredModelCheckpoint.adopt(callback, folder)
    if trainer.is_global_zero:
        io.checkpointer.session.log.info(
            "ModelCheckpoint saves below %s; tiered_checkpoint_io.callbacks.TieredModelCheckpoint in its place"
            " also saves to node memory, every memory_every_n_train_steps",
            folder,
        )
