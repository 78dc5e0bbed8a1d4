"""Trains a small model; kill it and start it again, and it resumes: python examples/quickstart.py s3://bucket/run."""

import sys
import time

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tiered_checkpoint_io import from_config


class SlowModel(BoringModel):
    """Takes as long for a step as a small model would."""

    def on_train_batch_end(self, *_: object) -> None:
        """Waits a moment."""
        time.sleep(0.05)


io, callback = from_config({"dirpath": sys.argv[1], "namespace": "quickstart"})
trainer = Trainer(plugins=[io], callbacks=[callback], max_steps=1000, logger=False)
trainer.fit(SlowModel(), ckpt_path="tiered:latest")
print(f"trained to step {trainer.global_step}")
