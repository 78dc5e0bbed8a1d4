"""A loop with Lightning Fabric; kill it and start it again, and it resumes: python examples/fabric.py s3://bucket/run.

On two ranks: python examples/fabric.py s3://bucket/run 2
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lightning.fabric import Fabric

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import CheckpointNotFoundError

MEMORY_EVERY, DURABLE_EVERY = 10, 50


def save(fabric: Fabric, io: TieredCheckpointIO, state: dict[str, Any]) -> None:
    """Saves a step to the tiers that it is due for; ``fabric.save`` itself saves to both."""
    step = state["step"]
    if fabric.is_global_zero and step % MEMORY_EVERY == 0:
        tiers = ["memory", "durable"] if step % DURABLE_EVERY == 0 else ["memory"]
        plain = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict(), "step": step}
        io.save_checkpoint(plain, f"step={step}.ckpt", {"tiers": tiers, "wait": False})


def train(dirpath: str, devices: int = 1, *, steps: int = 1000, step_s: float = 0.05, **options: Any) -> Any:
    """Trains from the newest checkpoint on; ``options`` are further keys of docs/configuration.md."""
    io = TieredCheckpointIO(dirpath, namespace="fabric", **options)
    strategy = "ddp" if devices > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=[io])
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    try:
        fabric.load("tiered:latest", state)
    except CheckpointNotFoundError:
        fabric.print("first start")
    while state["step"] < steps:
        # What a step sees depends on the step and the rank alone, so that a resumed run sees the same.
        seed = 1000 * state["step"] + fabric.global_rank
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        state["step"] += 1
        save(fabric, io, state)
        time.sleep(step_s)
    # Waits for uploads.
    io.teardown()
    fabric.print(f"trained to step {state['step']}")
    return model


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:]))
