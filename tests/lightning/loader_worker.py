"""A training whose batches come from a worker of its DataLoader; is told how that starts, and whether it persists.

Each worker has a process group of its own, as docs/operations.md says.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.supporting import build

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint


def alone(_):
    os.setpgrp()


class Slow(BoringModel):
    def training_step(self, *args):
        time.sleep(0.05)
        return super().training_step(*args)


class Ready(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            # Never read to its end: its worker is still there when the process ends.
            held.append(iter(DataLoader(torch.zeros(8, 1), num_workers=1, **options)))
            # The worker has left the group once it has given a batch.
            next(held[0])
            Path(told["ready"]).touch()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    io = AsyncCheckpointIO(build(TieredCheckpointIO, told["dirpath"], memory_dir=told["memory_dir"], drain="thread"))
    trainer = Trainer(
        plugins=[io],
        callbacks=[TieredModelCheckpoint(memory_every_n_train_steps=1000), PreemptionCheckpoint(), Ready()],
        max_steps=1000,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    options = {"multiprocessing_context": told["starts"], "persistent_workers": told["persists"]}
    options["worker_init_fn"] = alone
    held = []
    loader = DataLoader(torch.zeros(4000, 32), batch_size=2, num_workers=1, **options)
    trainer.fit(Slow(), loader)
