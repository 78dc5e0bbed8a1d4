"""One rank of a training that is told to end; is told when, and by whom, by a JSON object.

``signals``: lists of a rank, a moment (``train``, ``validation``, ``start``, ``end``) and a step.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted
from tiered_checkpoint_io.strategies import TieredModelParallelStrategy

BATCHES = 12
noted = {"at": None}


def tell(moment, step=0):
    for rank, when, at in told["signals"]:
        if (rank, when, at) == (int(os.environ["RANK"]), moment, step):
            time.sleep(told.get("pause", 0))
            noted["at"] = noted["at"] or time.monotonic()
            os.kill(os.getpid(), getattr(signal, told.get("signal", "SIGTERM")))


class Toy(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def configure_model(self):
        if told["strategy"] == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, *_):
        tell("train", self.global_step)
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.global_step))
        return (self.net(inputs) - inputs).pow(2).mean()

    def validation_step(self, _, index):
        tell("validation", index)
        # A long validation: nobody may wait for its end.
        if told.get("slow_validation") and noted["at"]:
            time.sleep(0.3)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(BATCHES * told["accumulate"], 1))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(told.get("validation", 3), 1))


class Moments(Callback):
    def on_fit_start(self, *_):
        tell("start")

    def on_train_end(self, *_):
        tell("end")


if __name__ == "__main__":
    told = {"accumulate": 1, "grace": 20.0, **json.loads(sys.argv[1])}
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    block = {
        "dirpath": told["dirpath"],
        "memory_dir": told["memory_dir"],
        "wait_timeout_s": 60,
        "enable_async_checkpointing": told.get("async", True),
        "memory_every_n_train_steps": 4,
        "s3_every_n_train_steps": None,
        **told.get("block", {}),
    }
    io = build(TieredCheckpointIO.from_config, block)
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = TieredModelParallelStrategy(ranks, 1) if told["strategy"] == "fsdp2" else told["strategy"]
    callbacks = [
        build(TieredModelCheckpoint.from_config, block, filename="{step}", save_top_k=told.get("top_k", 0)),
        PreemptionCheckpoint(grace_seconds=told["grace"], signals=("SIGTERM", "SIGUSR1"), requeue=told.get("requeue")),
        Moments(),
        # Saves on all ranks together, where all of them fail.
        *([OnExceptionCheckpoint(told["dirpath"])] if told.get("on_exception") else ()),
    ]
    trainer = Trainer(
        plugins=[io],
        strategy=strategy,
        callbacks=callbacks,
        max_steps=told.get("steps", 10),
        accelerator="cpu",
        devices=ranks,
        logger=False,
        val_check_interval=6 * told["accumulate"],
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accumulate_grad_batches=told["accumulate"],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Toy()
    answer = {"ended": "fit", "code": 0}
    try:
        if told.get("thread"):
            # As a worker of Ray Train does.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(trainer.fit, model, ckpt_path="tiered:latest").result()
        else:
            trainer.fit(model, ckpt_path=told.get("ckpt_path", "tiered:latest"))
        answer["weight"] = [value.double().sum().item() for value in model.state_dict().values()]
        if dist.is_initialized():
            answer["weight"] = model.state_dict()
            answer["weight"] = [
                (value.full_tensor() if hasattr(value, "full_tensor") else value).double().sum().item()
                for value in answer["weight"].values()
            ]
    except Preempted as end:
        answer = {"ended": "preempted", "code": end.code}
    answer["step"] = trainer.global_step
    restored = io.checkpointer.restored
    answer["from"] = restored and [restored.name, restored.step, restored.tier]
    answer["after"] = noted["at"] and time.monotonic() - noted["at"]
    with open(told["answer"] + ".new", "w") as file:
        json.dump(answer, file)
    os.rename(told["answer"] + ".new", told["answer"])
    if told["signals"]:
        # Nobody listens any more: it does what it did before.
        signal.raise_signal(signal.SIGTERM)
        os.unlink(told["answer"])
