"""A tiny model, loggers and trainers for the tests of training."""

import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from support.supporting import build
from torch.utils.data import DataLoader

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.ids import MANIFEST_PREFIX, name_from_manifest_key
from tiered_checkpoint_io.stores import open_store


class Stop(Exception):
    """Ends a training as a crash would: nothing that belongs to a regular end is run."""


class Model(LightningModule):
    """Twenty batches an epoch; ``score`` goes up and down, so that it has a top-k."""

    def __init__(self, stop_at=0, ballast=0):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 4)
        self.register_buffer("ballast", torch.zeros(ballast))
        self.stop_at = stop_at

    def training_step(self, batch, _):
        # A step's data depends only on the step: Lightning does not wind a plain loader forward.
        batch = batch * 0 + torch.arange(8.0) * (self.global_step % 5 + 1) / 10
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        self.log("score", torch.tensor(float((self.global_step * 7) % 10)))
        return loss

    def test_step(self, batch, _):
        self.log("test", self.layer(batch).mean())

    def on_train_batch_end(self, *_):
        if self.stop_at and self.global_step == self.stop_at:
            raise Stop

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        data = torch.arange(40 * 8, dtype=torch.float32).view(40, 8) / 100
        return DataLoader(data, batch_size=2)

    test_dataloader = train_dataloader


class Told(Model):
    """Sends its own process a signal within a step, and may fail in each save."""

    def __init__(self, at, number=signal.SIGTERM, fails=False):
        super().__init__()
        self.at, self.number, self.fails = at, number, fails

    def on_train_batch_start(self, *_):
        if self.global_step == self.at - 1:
            os.kill(os.getpid(), self.number)

    def on_save_checkpoint(self, _):
        if self.fails:
            raise RuntimeError("a hook of the user's")


class LogBook(Logger):
    """Notes metrics, and the durable checkpoints at each report of one."""

    name = "book"
    version = "0"

    def __init__(self, dirpath):
        super().__init__()
        self.dirpath = dirpath
        self.metrics = []
        self.states = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def after_save_checkpoint(self, callback):
        self.states.append((callback.best_model_path, callback.last_model_path, durable(self.dirpath)))


class Runs:
    """Trainings of one job: one durable tier, one node's memory."""

    #: A process of its own, as by default, if a test says so: its start takes longer than most trainings.
    drain = "thread"

    def __init__(self, dirpath, memory_dir, root):
        self.dirpath = dirpath
        self.memory_dir = memory_dir
        self.root = root

    def io(self, **options):
        return build(
            TieredCheckpointIO,
            **{
                "dirpath": self.dirpath,
                "memory_dir": self.memory_dir,
                "wait_timeout_s": 60,
                "drain": self.drain,
                **options,
            },
        )

    def trainer(self, callbacks, *, io=None, asynchronous=True, plugins=None, **options):
        io = io or self.io()
        trainer = Trainer(
            **{
                "plugins": [AsyncCheckpointIO(io) if asynchronous else io] if plugins is None else plugins,
                "callbacks": callbacks,
                "max_steps": 20,
                "logger": False,
                "accelerator": "cpu",
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": self.root,
                **options,
            }
        )
        trainer.io = io
        return trainer

    def fit(self, *callbacks, stop_at=0, ckpt_path="tiered:latest", model=None, **options):
        """Trains from ``ckpt_path`` to the end, or until a crash at a step."""
        trainer = self.trainer(list(callbacks), **options)
        model = model or Model(stop_at)
        try:
            trainer.fit(model, ckpt_path=ckpt_path)
        except Stop:
            trainer.io.teardown()
        return trainer, model

    def durable(self):
        return durable(self.dirpath)

    def wipe(self):
        """Loses the node: nothing is left in its memory."""
        wipe(self.memory_dir)


def durable(dirpath):
    """Returns the names of all checkpoints on the durable tier."""
    store = open_store(TieredCheckpointConfig(dirpath=dirpath))
    try:
        return sorted(name_from_manifest_key(entry.key) for entry in store.list(MANIFEST_PREFIX))
    finally:
        store.close()


def wipe(memory_dir):
    for file in Path(memory_dir).rglob("saves/*/*/*"):
        file.unlink()
    for folder in Path(memory_dir).rglob("saves/*/rank-*"):
        folder.rmdir()
