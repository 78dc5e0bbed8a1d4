"""A NeMo script with one line changed: where S3CheckpointIO is imported from.

python examples/nemo/drop_in.py exp_manager.checkpoint_callback_params.dirpath=s3://bucket/gpt/checkpoints
"""

from __future__ import annotations

import sys

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from nemo.utils.exp_manager import exp_manager
from omegaconf import DictConfig
from train import TinyModel, read_config

# from nemo.utils.callbacks.s3_checkpoint_io import S3CheckpointIO
from tiered_checkpoint_io.nemo import S3CheckpointIO


def train(cfg: DictConfig) -> Trainer:
    """Trains as in NeMo's documents."""
    async_checkpointing = cfg.s3_checkpointing.get("enable_async_checkpointing", False)
    chunk_size_MB = cfg.s3_checkpointing.get("chunk_size_MB")  # noqa: N806 - NeMo's
    max_read_concurrency = cfg.s3_checkpointing.get("max_read_concurrency")
    max_write_concurrency = cfg.s3_checkpointing.get("max_write_concurrency")
    dirpath = cfg.exp_manager.checkpoint_callback_params.get("dirpath")

    s3_checkpoint_io = S3CheckpointIO(
        dirpath=dirpath,
        chunk_size_MB=chunk_size_MB,
        max_read_concurrency=max_read_concurrency,
        max_write_concurrency=max_write_concurrency,
        async_checkpointing=async_checkpointing,
    )
    strategy = DDPStrategy(checkpoint_io=s3_checkpoint_io, process_group_backend="gloo")
    trainer = Trainer(strategy=strategy, **cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    trainer.fit(TinyModel(cfg.model, trainer))
    return trainer


if __name__ == "__main__":
    done = train(read_config(sys.argv[1:]))
    print(f"ended at step {done.global_step}")
