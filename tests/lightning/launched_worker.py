"""A training that Lightning's own launcher starts on two ranks, of which the first is told to end."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.supporting import build
from support.training import Model

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint


class Told(Model):
    def on_train_batch_end(self, *_):
        if self.global_step == 4 and self.trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    torch.set_num_threads(1)
    io = build(TieredCheckpointIO, **json.loads(sys.argv[1]))
    trainer = Trainer(
        plugins=[AsyncCheckpointIO(io)],
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        max_steps=20,
        callbacks=[
            TieredModelCheckpoint(memory_every_n_train_steps=2, save_top_k=0),
            PreemptionCheckpoint(grace_seconds=30, requeue=False),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Told())
