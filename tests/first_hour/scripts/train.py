"""The plugin and its callback, from one block; keys of the block on the command line.

``kill=37`` and ``interrupt=37`` end it at that step, as ``kill -9`` and Ctrl-C do.
"""

import os
import signal
import sys

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

block = OmegaConf.from_dotlist(["dirpath=s3://bucket/run", "namespace=first", *sys.argv[1:]])
max_steps, resume = block.pop("max_steps", 60), block.pop("resume", "tiered:latest")
signals = {block.pop("kill", 0): signal.SIGKILL, block.pop("interrupt", 0): signal.SIGINT}


class Stop(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in signals:
            os.kill(os.getpid(), signals[trainer.global_step])


trainer = Trainer(
    plugins=[TieredCheckpointIO.from_config(block)],
    callbacks=[TieredModelCheckpoint.from_config(block, filename="{step}"), Stop()],
    max_steps=max_steps,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(BoringModel(), ckpt_path=resume)
print(f"trained to step {trainer.global_step}")
