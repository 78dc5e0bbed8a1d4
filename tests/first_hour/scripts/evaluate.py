"""An evaluation where no checkpoint was ever saved."""

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

for callbacks in ([], [TieredModelCheckpoint()]):
    for evaluate in (Trainer.validate, Trainer.test):
        trainer = Trainer(
            plugins=[TieredCheckpointIO(dirpath="s3://bucket/nothing", namespace="first")],
            callbacks=callbacks,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        print(evaluate.__name__, "with", callbacks[0].__class__.__name__ if callbacks else "the plugin alone")
        try:
            evaluate(trainer, BoringModel(), ckpt_path="tiered:latest", verbose=False)
            print("evaluated weights that were never trained")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
