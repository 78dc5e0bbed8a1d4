"""A training on a GPU, as a user's script has it; its argument is a JSON object, and so is the last line that it prints."""

import contextlib
import hashlib
import json
import os
import signal
import sys

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.supporting import build

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO, dcp
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.strategies import TieredFSDPStrategy, TieredModelParallelStrategy


class Toy(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 64))

    def configure_model(self):
        if told["strategy"].startswith("fsdp2"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, *_):
        loss = loss_of(self.net, self.global_step)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=told["accelerator"] == "gpu")

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(100, 1))


class Dies(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == told.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)


class Counts(Callback):
    """How many saves overlapped training."""

    overlapped, last = 0, None

    def on_train_batch_end(self, trainer, *_):
        made = trainer.io.checkpointer.session.last_save
        if made is not self.last:
            self.last, self.overlapped = made, self.overlapped + bool(made.overlapped)


def loss_of(net, step):
    """By the step alone."""
    device = next(net.parameters()).device
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
    return (net(batch) - batch).pow(2).mean()


def digest(module):
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode() + whole.cpu().numpy().tobytes())
    return found.hexdigest()


def by_lightning():
    options = {"save_distributed_checkpoint": told["strategy"] != "fsdp2 full"}
    strategy = {
        "fsdp": lambda: TieredFSDPStrategy(state_dict_type="sharded"),
        "fsdp2": lambda: TieredModelParallelStrategy(1, 1, **options),
        "fsdp2 full": lambda: TieredModelParallelStrategy(1, 1, **options),
    }.get(told["strategy"], lambda: told["strategy"])()
    io = build(TieredCheckpointIO, **places, staging=told["staging"], on_save_error="raise", wait_timeout_s=60)
    steps = TieredModelCheckpoint(memory_every_n_train_steps=2, s3_every_n_train_steps=10, save_top_k=-1)
    counts = Counts()
    trainer = Trainer(
        plugins=[AsyncCheckpointIO(io)],
        strategy=strategy,
        precision=told["precision"],
        callbacks=[steps, counts, Dies()],
        max_steps=told["steps"],
        accelerator=told["accelerator"],
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.io = io
    model = Toy()
    ends = []
    # Those of FSDP are no longer whole; the loss tells.
    model.on_train_end = lambda: ends.append(None if told["strategy"] == "fsdp" else digest(model))
    trainer.fit(model, ckpt_path="tiered:latest")
    restored = io.checkpointer.restored
    found = {"weights": ends[0], "overlapped": counts.overlapped, "loss": trainer.callback_metrics["loss"].item()}
    return found | {"from": restored and [restored.step, restored.tier]}


def by_a_loop():
    """FSDP2 without Lightning, whose ranks have NCCL alone."""
    device = "cuda" if told["accelerator"] == "gpu" else "cpu"
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    net = nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 64)).to(device)
    fully_shard(net, mesh=torch.distributed.init_device_mesh(device, (1,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def state():
        model, moments = dcp_state.get_state_dict(net, optimizer)
        return {"model": model, "optimizer": moments, "step": step}

    step, came = 0, None
    for parameter in net.parameters():
        # So that the optimizer has a state to load into.
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    loaded = state()
    with contextlib.suppress(CheckpointNotFoundError):
        reader = build(dcp.load, loaded, **places)
        model, moments, step = loaded["model"], loaded["optimizer"], loaded["step"]
        dcp_state.set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
        came = [step, reader.tier]
    while step < told["steps"]:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        step += 1
        if step % 2 == 0:
            build(dcp.async_save, state(), checkpoint_id=f"step_{step}", save_to_s3=step % 10 == 0, **places).result()
        if step == told.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)
    found = {"weights": digest(net), "overlapped": 0, "from": came}
    dcp.maybe_finalize_async_calls(blocking=True)
    torch.distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    places = {"dirpath": told["dirpath"], "memory_dir": told["memory_dir"]}
    seed_everything(1, verbose=False)
    answer = by_a_loop() if told["strategy"] == "loop" else by_lightning()
    print(json.dumps(answer))
