"""Lightning's OnExceptionCheckpoint: what it has saved is one of the last checkpoints, as Lightning has it."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.errors import InvalidNameError
from tiered_checkpoint_io.model import ids


def count_as_last(trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Has ``ckpt_path="last"`` mean the newest of the checkpoints called "last" and of those of OnExceptionCheckpoint.

    Beside that callback, Lightning takes "last" for a ``fit`` without ckpt_path. Where the callback saves elsewhere, a
    warning says that its checkpoint is not found.

    Raises:
        InvalidNameError: It can't save there: it would say so where training ends.
    """
    engine, names = io.checkpointer, set()
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(each, OnExceptionCheckpoint):
            continue
        try:
            names.add(ids.name_in(engine.dirpath, each.ckpt_path))
        except InvalidNameError:
            if not io._is_elsewhere(each.ckpt_path):
                raise
            if trainer.is_global_zero and each.ckpt_path not in engine.session.warned:
                engine.session.warned.add(each.ckpt_path)
                engine.session.log.warning(
                    "OnExceptionCheckpoint saves to %s, which is not below %s: its checkpoint is in neither tier, and"
                    " ckpt_path='last' passes it by; give it dirpath='', which stands for that folder",
                    each.ckpt_path,
                    engine.dirpath,
                )
    engine.also_last = frozenset(names)
