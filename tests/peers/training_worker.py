"""One rank of a training of two nodes; a JSON object describes the work."""

import hashlib
import json
import os
import signal
import sys
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from support.supporting import build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.strategies import TieredModelParallelStrategy

PATIENCE_S = 20.0


class Toy(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, *_):
        seed = 100 * self.global_step + self.global_rank
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        return (self.net(inputs) - inputs).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(200, 1))


class Watch(Callback):
    """Notes the weights of each step; kills the rank at one, once its copies are on peers."""

    def __init__(self):
        #: None if there is nothing left to train.
        self.began_at = None
        #: Weights before each step, by step.
        self.weights = {}

    def on_train_start(self, trainer, _):
        self.began_at = trainer.global_step
        self.weights[self.began_at] = digest(model)

    def on_train_batch_end(self, trainer, *_):
        self.weights[trainer.global_step] = digest(model)
        if trainer.global_step == job.get("die_at"):
            session, deadline = io.checkpointer.session, time.monotonic() + PATIENCE_S
            tier = session.open().tier
            held = tier.held()
            newest = max(each.save_id for each in held)
            while not all(s.replicated for s in tier.held() if s.save_id == newest):
                assert time.monotonic() < deadline, "the newest checkpoint did not get to peers"
                time.sleep(0.02)
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def digest(module):
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    # The variables of a launcher on two nodes.
    os.environ.update(NODE_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2))
    seed_everything(1, verbose=False)
    block = {**job["options"], "memory_every_n_train_steps": 1, "wait_timeout_s": 60, "on_save_error": "raise"}
    block |= {"enable_async_checkpointing": True, "s3_every_n_train_steps": None}
    block["save_on_train_end"] = job.get("save_on_train_end", False)
    io = build(TieredCheckpointIO.from_config, block)
    watch, model = Watch(), Toy()
    trainer = Trainer(
        plugins=[io],
        strategy=TieredModelParallelStrategy(4, 1),
        # No step but those of memory.
        callbacks=[build(TieredModelCheckpoint.from_config, block, filename="{step}", save_top_k=0), watch],
        max_steps=job["steps"],
        accelerator="cpu",
        num_nodes=2,
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path="tiered:latest")
    restored = io.checkpointer.restored
    answer = {
        "weights": watch.weights,
        "from": restored and (restored.step, restored.tier),
        "began_at": watch.began_at,
    }
    with open(job["answer"] + ".new", "w") as file:
        json.dump(answer, file)
    os.rename(job["answer"] + ".new", job["answer"])
