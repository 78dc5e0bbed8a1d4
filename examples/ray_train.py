"""Ray Train: a worker is killed, Ray starts the workers again, and they resume from node memory.

pip install 'ray[train]'; python examples/ray_train.py s3://bucket/run
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def loop(config: dict[str, Any]) -> None:
    """Runs on each worker, at each start of the workers."""
    import ray.train
    import ray.train.torch
    import torch

    from tiered_checkpoint_io import TieredCheckpointIO

    # Ray runs this on a thread of the worker, and not on the main thread.
    TieredCheckpointIO.train_here()
    context, io = ray.train.get_context(), TieredCheckpointIO(**config["tiers"])
    rank = context.get_world_rank()
    torch.manual_seed(1)
    inner = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # All workers call this, and get the same checkpoint: the newest that is intact, or something falsy.
    found = io.load_checkpoint("tiered:latest")
    first = 0
    if found:
        inner.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    for step in range(first + 1, config["steps"] + 1):
        # What a step sees depends on the step and the rank alone, so that a resumed run sees the same.
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            tiers = ["memory", "durable"] if step % 20 == 0 else ["memory"]
            io.save_checkpoint(state, f"step={step}.ckpt", {"tiers": tiers, "wait": False})
        if step == config["die_at"] and not found and rank == context.get_world_size() - 1:
            # Without notice, once: as if the kernel had run out of memory.
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 10 == 0:
            # Without a Ray checkpoint: ours are what the workers resume from.
            ray.train.report({"step": step, "loss": loss.item(), "resumed_from": first})
    if rank == 0:
        torch.save(inner.state_dict(), config["weights"])
    # Waits for uploads.
    io.teardown()


def train(dirpath: str, storage: str, *, workers: int = 2, steps: int = 50, die_at: int = 37, **options: Any) -> Path:
    """Trains; gives the file with the weights. ``options`` are further keys of docs/configuration.md."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    tiers = {"dirpath": dirpath, "namespace": "ray", **options}
    weights = Path(storage, "weights.pt")
    config = {"tiers": tiers, "steps": steps, "die_at": die_at, "weights": str(weights)}
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        # Ray starts the workers again.
        run_config=RunConfig(storage_path=storage, name="run", failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()
    return weights


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as storage:
        train(sys.argv[1], storage)
