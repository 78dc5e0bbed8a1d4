"""A real NeMo model, and trainings of it as a NeMo user sets them up."""

import copy
import os
import signal

import torch
from lightning.pytorch import Trainer
from nemo.core import ModelPT
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf
from support.supporting import build
from support.training import Runs, Stop

from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.nemo import NeMoCheckpointConnector, S3CheckpointIO, tiered_exp_manager
from tiered_checkpoint_io.stores import open_store

#: Training steps between two validations, by which NeMo saves.
EVERY = 5


class Model(ModelPT):
    """Validates every five steps; ``val_loss`` goes up and down, so that it has a top-k."""

    def __init__(self, cfg, trainer=None, *, stop_at=0, how=None):
        super().__init__(cfg=cfg, trainer=trainer)
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 4)
        self.register_buffer("ballast", torch.zeros(int(cfg.get("ballast", 0))), persistent=True)
        self.seen = {}
        self.stop_at = stop_at
        self.how = how

    def training_step(self, batch, _):
        # A step's data depends only on the step: Lightning does not wind a plain loader forward.
        batch = batch * 0 + torch.arange(8.0) * (self.global_step % 7 + 1) / 10
        loss = self.layer(batch).pow(2).mean()
        self.seen[self.global_step] = loss.item()
        return loss

    def validation_step(self, *_):
        self.log("val_loss", torch.tensor(float((self.global_step * 7) % 10 + 1)), sync_dist=True)

    def on_train_batch_end(self, *_):
        if self.stop_at and self.global_step == self.stop_at:
            if self.how is None:
                raise Stop
            os.kill(os.getpid(), getattr(signal, self.how))

    def setup_training_data(self, _):
        self._train_dl = torch.utils.data.DataLoader(torch.zeros(400, 8), batch_size=2)

    def setup_validation_data(self, _):
        self._validation_dl = torch.utils.data.DataLoader(torch.zeros(2, 8), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    @classmethod
    def list_available_models(cls):
        return []


#: The configuration in NeMo's documents, except that it ends soon.
CONFIG = {
    "exp_manager": {
        "exp_dir": None,
        "name": "gpt",
        "create_tensorboard_logger": False,
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        # NeMo lets the other ranks sleep while rank 0 makes folders.
        "seconds_to_sleep": 0,
        "checkpoint_callback_params": {
            "monitor": "val_loss",
            "save_top_k": 2,
            "mode": "min",
            "filename": "gpt--{val_loss:.2f}-{step}",
            "save_nemo_on_train_end": False,
        },
    },
    "s3_checkpointing": {
        "max_write_concurrency": 10,
        "max_read_concurrency": 15,
        "chunk_size_MB": 64,
        "enable_async_checkpointing": False,
    },
    "model": {
        "ballast": 0,
        "layers": [1, {"width": "8"}],
        "train_ds": {"x": 1},
        "validation_ds": {"x": 1},
        "optim": None,
    },
}


def merged(*parts):
    """Returns one configuration of several, the later ones first."""
    result = copy.deepcopy(CONFIG)
    for part in parts:
        result = OmegaConf.to_container(OmegaConf.merge(result, part))
    return result


class NeMoRuns:
    """Trainings of one job: one durable tier, one node's memory, one folder for logs."""

    def __init__(self, dirpath, memory_dir, root, **io):
        self.dirpath = dirpath
        self.memory_dir = memory_dir
        self.root = str(root)
        self.io = {"memory_dir": memory_dir, "on_save_error": "raise", **io}

    def config(self, *parts):
        base = {
            "exp_manager": {"exp_dir": self.root, "checkpoint_callback_params": {"dirpath": self.dirpath}},
            "s3_checkpointing": {},
        }
        return merged(base, *parts)

    def bare(self, **options):
        """Returns a trainer that exp_manager has not seen."""
        common = {
            "max_steps": 20,
            "val_check_interval": EVERY,
            "num_sanity_val_steps": 0,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**{**common, **options})

    def trainer(self, config, *, way="drop-in", **options):
        """Returns a trainer that is ready to fit.

        ``drop-in``: NeMo's exp_manager and our S3CheckpointIO, with nothing else changed; ``connector``: the
        same, with the connector that NeMo's documents set before; ``tiered``: tiered_exp_manager.
        """
        if way == "tiered":
            config = merged(config, {"s3_checkpointing": self.io})
            trainer = self.bare(**options)
            tiered_exp_manager(trainer, OmegaConf.create(config))
            return trainer
        block = config["s3_checkpointing"]
        io = build(
            S3CheckpointIO,
            dirpath=config["exp_manager"]["checkpoint_callback_params"]["dirpath"],
            chunk_size_MB=block.get("chunk_size_MB"),
            max_read_concurrency=block.get("max_read_concurrency"),
            max_write_concurrency=block.get("max_write_concurrency"),
            async_checkpointing=block.get("enable_async_checkpointing", False),
            **self.io,
        )
        trainer = self.bare(**{"plugins": [io], **options})
        if way == "connector":
            trainer._checkpoint_connector = NeMoCheckpointConnector(trainer)
        exp_manager(trainer, OmegaConf.create(config["exp_manager"]))
        return trainer

    def fit(self, *parts, way="drop-in", stop_at=0, how=None, model=Model, **options):
        """Resumes training, and trains to the end or until a crash at a step."""
        config = self.config(*parts)
        trainer = self.trainer(config, way=way, **options)
        module = model(OmegaConf.create(config["model"]), trainer, stop_at=stop_at, how=how)
        try:
            trainer.fit(module)
        except Stop:
            trainer.strategy.checkpoint_io.teardown()
        return trainer, module

    durable, wipe = Runs.durable, Runs.wipe

    def objects(self, prefix=""):
        """Returns all objects at the durable tier, except this package's own documents."""
        store = open_store(TieredCheckpointConfig(dirpath=self.dirpath))
        try:
            return sorted(entry.key for entry in store.list(prefix) if not entry.key.startswith(".tiered/"))
        finally:
            store.close()


def io_of(trainer):
    return trainer.strategy.checkpoint_io


def callback_of(trainer):
    return trainer.checkpoint_callback


def restored(trainer):
    found = io_of(trainer).checkpointer.restored
    return found and (found.name, found.step, found.tier)


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
