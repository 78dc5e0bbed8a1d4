"""Training of a user with the installed wheel, which continues from the end of the last run."""

import sys

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

dirpath, memory_dir, max_steps = sys.argv[1:]
block = {"dirpath": dirpath, "memory_dir": memory_dir, "namespace": "dist", "memory_every_n_train_steps": 5}


class Model(BoringModel):
    def on_train_start(self) -> None:
        print(f"starts at step {self.global_step}")


trainer = Trainer(
    plugins=[TieredCheckpointIO.from_config(block)],
    callbacks=[TieredModelCheckpoint.from_config(block)],
    max_steps=int(max_steps),
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), ckpt_path="tiered:latest")
