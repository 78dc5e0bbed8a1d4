"""Trains a small model; kill it and start it again, and it resumes: python examples/quickstart.py s3://bucket/run."""

import sys
import time

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tiered_checkpoint_io import from_config


class SlowModel(BoringModel):
    """Takes as long for a step as a small model would, with a learning rate that stays."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns an optimizer without the scheduler of BoringModel, whose rate falls to a tenth in each epoch."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: object) -> None:
        """Waits a moment."""
        time.sleep(0.05)


io, callback = from_config({"dirpath": sys.argv[1], "namespace": "quickstart"})
trainer = Trainer(plugins=[io], callbacks=[callback], max_steps=1000, logger=False)
trainer.fit(SlowModel(), ckpt_path="tiered:latest")
print(f"trained to step {trainer.global_step}")
