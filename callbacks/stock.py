"""Lightning's own ModelCheckpoint in a trainer that has our checkpoint IO."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint
from tiered_checkpoint_io.errors import InvalidNameError, UsageError
from tiered_checkpoint_io.model import ids


def place_checkpoints(trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Has Lightning's own ModelCheckpoint save below the IO's dirpath, where it has no dirpath of its own.

    Classes derived from it are their authors' business.

    Raises:
        UsageError: It has one elsewhere.
    """
    root = io.config.dirpath
    for callback in trainer.checkpoint_callbacks:
        if type(callback) is not ModelCheckpoint:
            continue
        if callback.dirpath is None:
            adopt(callback)
            if trainer.is_global_zero:
                io.checkpointer.session.log.info(
                    "ModelCheckpoint saves below %s; tiered_checkpoint_io.callbacks.TieredModelCheckpoint in its place"
                    " also saves to node memory, every memory_every_n_train_steps",
                    root,
                )
        elif not _is_below(str(callback.dirpath), root):
            raise UsageError(
                f"ModelCheckpoint(dirpath={str(callback.dirpath)!r}) does not save below TieredCheckpointIO's dirpath"
                f" {root!r}",
                operation="setup",
                hint="leave the callback's dirpath out, or name a folder below the IO's",
            )


def _is_below(folder: str, root: str) -> bool:
    try:
        ids.name_in(root, f"{folder.rstrip('/')}/x")
    except InvalidNameError:
        return False
    return True


def adopt(stock: ModelCheckpoint) -> None:
    """Makes a ModelCheckpoint one of ours, which saves below the IO's dirpath.

    In place, because the user may hold it and ask it for its ``best_model_path``. Lightning's class could not do it: it
    looks into a remote folder by a file system of its own.

    Args:
        stock: Not of a derived class; before its ``setup``.
    """
    stock.__class__ = TieredModelCheckpoint
    assert isinstance(stock, TieredModelCheckpoint)
    stock.memory_every_n_train_steps = stock.s3_every_n_train_steps = None
    if stock.save_last == "link":
        stock.save_last = True
    stock.begin()
