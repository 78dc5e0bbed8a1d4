"""``.nemo`` files at the durable tier."""

from __future__ import annotations

import mmap
import os
import tempfile

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.ranks.coordination import portable
from tiered_checkpoint_io.errors import ExportError, TieredCheckpointError
from tiered_checkpoint_io.model import ids


def export_model(trainer: Trainer, pl_module: LightningModule, engine: Checkpointer, path: str) -> None:
    """Has a model write its ``.nemo`` file, and puts that to the durable tier; on all ranks.

    The file appears, or changes, as a whole. A model that has no ``save_to`` is told of, and skipped, as
    NeMo has it.

    Args:
        trainer: Whose ranks take part.
        pl_module: A NeMo model.
        engine: Of the checkpoint IO.
        path: Below the IO's dirpath.

    Raises:
        ExportError: The model could not write it; the same on all ranks.
        StoreError: The durable tier would not take it; the same on all ranks.
    """
    save_to = getattr(pl_module, "save_to", None)
    if not callable(save_to):
        rank_zero_warn(f"{type(pl_module).__name__} does not implement save_to(): there will be no .nemo file")
        return
    key = ids.name_in(engine.dirpath, path)
    failed: TieredCheckpointError | None = None
    with tempfile.TemporaryDirectory(prefix="tiered-nemo-") as folder:
        file = os.path.join(folder, os.path.basename(key))
        try:
            # On every rank: a model whose parts lie on several gathers them here.
            save_to(save_path=file)
            if trainer.is_global_zero:
                _upload(engine, file, key)
        except Exception as error:
            failed = error if isinstance(error, TieredCheckpointError) else _cannot(error, path, trainer.global_step)
            failed = portable(failed, trainer.global_rank)
    done = trainer.strategy.reduce_boolean_decision(failed is None)
    failed = trainer.strategy.broadcast(failed) or failed
    if not done:
        raise failed or ExportError("the model could not be exported on another rank", operation="export", key=path)
    if trainer.is_global_zero:
        engine.session.log.info("Step %d: exported %s", trainer.global_step, path)


def _upload(engine: Checkpointer, file: str, key: str) -> None:
    with (
        open(file, "rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
    ):
        engine.session.durable().upload(key, view)


def _cannot(error: Exception, path: str, step: int) -> ExportError:
    return ExportError(
        f"the model could not be exported: {type(error).__name__}: {error}", operation="export", key=path, step=step
    )
