"""Trains a small NeMo model with checkpoints in node memory and on S3; start it again, and it goes on.

    python examples/nemo/train.py exp_manager.checkpoint_callback_params.dirpath=s3://bucket/gpt/checkpoints

Any key of config.yaml may be given so. Needs nemo_toolkit[core]; runs on one CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from nemo.core import ModelPT
from omegaconf import DictConfig

from tiered_checkpoint_io.nemo import tiered_exp_manager


class TinyModel(ModelPT):
    """Learns to give back what it is given."""

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None) -> None:
        super().__init__(cfg=cfg, trainer=trainer)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, cfg.width), torch.nn.GELU(), torch.nn.Linear(cfg.width, 16))

    def _loss(self, seed: int) -> torch.Tensor:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        return (self.net(inputs) - inputs).pow(2).mean()

    def training_step(self, *_: Any) -> torch.Tensor:
        return self._loss(self.global_step)

    def validation_step(self, *_: Any) -> None:
        self.log("val_loss", self._loss(-1))

    def setup_training_data(self, cfg: DictConfig) -> None:
        self._train_dl = torch.utils.data.DataLoader(torch.zeros(cfg.batches, 1))

    def setup_validation_data(self, cfg: DictConfig) -> None:
        self._validation_dl = torch.utils.data.DataLoader(torch.zeros(cfg.batches, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @classmethod
    def list_available_models(cls) -> list[Any]:
        return []


def train(cfg: DictConfig) -> Trainer:
    """Trains to the end, from the newest checkpoint there is."""
    trainer = Trainer(**cfg.trainer)
    # In NeMo's own examples: exp_manager(trainer, cfg.exp_manager)
    tiered_exp_manager(trainer, cfg)
    model = TinyModel(cfg.model, trainer)
    trainer.fit(model)
    return trainer


def read_config(overrides: list[str]) -> DictConfig:
    """config.yaml, with single keys changed."""
    with initialize_config_dir(str(Path(__file__).parent.resolve()), version_base=None):
        return compose("config", overrides)


if __name__ == "__main__":
    import sys

    done = train(read_config(sys.argv[1:]))
    restored = done.strategy.checkpoint_io.checkpointer.restored
    print(f"began at step {restored.step if restored else 0}, ended at step {done.global_step}")
