"""One set of defaults: a dict, OmegaConf and the YAML file."""

from importlib.resources import files

from omegaconf import OmegaConf

import tiered_checkpoint_io
from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

short = {"dirpath": "s3://bucket/run", "namespace": "gpt-1"}
yaml = files(tiered_checkpoint_io) / "configs" / "s3_checkpointing" / "default.yaml"
for name, block in (
    ("dict", short),
    ("OmegaConf", OmegaConf.create(short)),
    ("YAML", OmegaConf.merge(OmegaConf.load(str(yaml)), short)),
):
    io = TieredCheckpointIO.from_config(block)
    callback = TieredModelCheckpoint.from_config(block)
    every = callback.memory_every_n_train_steps, callback.s3_every_n_train_steps
    print(f"{name}: {type(io).__name__}, memory every {every[0]} steps, S3 every {every[1]}")
