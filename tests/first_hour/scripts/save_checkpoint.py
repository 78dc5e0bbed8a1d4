"""Only the plugin, and trainer.save_checkpoint with a name, and with an absolute path."""

import os

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tiered_checkpoint_io import TieredCheckpointIO

trainer = Trainer(
    plugins=[TieredCheckpointIO(dirpath="s3://bucket/run", namespace="first")],
    max_steps=5,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(BoringModel())
trainer.save_checkpoint("x.ckpt")
trainer.save_checkpoint(os.path.abspath("y.ckpt"))
print("here:", sorted(name for name in os.listdir() if name.endswith(".ckpt")))
print("best:", trainer.checkpoint_callback.best_model_path)
