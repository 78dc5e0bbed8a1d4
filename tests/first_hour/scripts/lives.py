"""A training whose steps are the same in each life, because data depends only on the step; prints its last result.

``kill=13`` ends it at that step as ``kill -9`` does.
"""

import hashlib
import os
import signal
import sys

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

STEPS = 30
options = dict(each.split("=", 1) for each in sys.argv[1:])


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def training_step(self, *_):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(self.global_step))
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(STEPS * 2, 1))


class Kill(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == int(options.get("kill", 0)):
            os.kill(os.getpid(), signal.SIGKILL)


seed_everything(1, verbose=False)
model = Model()
trainer = Trainer(
    plugins=[AsyncCheckpointIO(TieredCheckpointIO(dirpath=options["dirpath"], namespace=options["namespace"]))],
    callbacks=[
        TieredModelCheckpoint(memory_every_n_train_steps=5, s3_every_n_train_steps=10, filename="{step}"),
        Kill(),
    ],
    max_steps=STEPS,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, ckpt_path="tiered:latest")
digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
print(f"weights {digest.hexdigest()}")
