"""``.nemo`` files on the durable tier."""

from __future__ import annotations

import os
import tempfile

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.errors import ExportError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo.ranks import first_error
from tiered_checkpoint_io.nemo.s3_utils import upload_file


def export_model(trainer: Trainer, pl_module: LightningModule, engine: Checkpointer, path: str) -> None:
    """Writes a model's ``.nemo`` file to the durable tier, atomically; on all ranks.

    A model without ``save_to`` is skipped with a warning, as NeMo does it.

    Args:
        trainer: Whose ranks take part.
        pl_module: A NeMo model.
        engine: Of the checkpoint IO.
        path: Below the IO's dirpath.

    Raises:
        ExportError: The model could not write it; the same on all ranks.
        StoreError: The upload failed; the same on all ranks.
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
                upload_file(engine.session.durable(), key, file)
        except TieredCheckpointError as error:
            failed = error
        except Exception as error:
            text = f"the model could not be exported: {type(error).__name__}: {error}"
            failed = ExportError(text, operation="export", key=path, step=trainer.global_step, rank=trainer.global_rank)
    failed = first_error(trainer, failed)
    if failed is not None:
        raise failed
    if trainer.is_global_zero:
        engine.session.log.info("Step %d: exported %s", trainer.global_step, path)
