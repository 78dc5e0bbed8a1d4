"""A training loop that saves by Meta's torch_checkpointing; is told what to do by a JSON object."""

import hashlib
import json
import os
import signal
import sys

import torch
from support.supporting import build
from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig

from tiered_checkpoint_io.torch_checkpointing import TieredStorageConfig

if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    tiers = build(TieredStorageConfig, told["dirpath"], told["options"], s3_every_n_steps=10)
    manager = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=tiers))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    optimizer, first = torch.optim.AdamW(model.parameters(), lr=1e-2), 0

    def state():
        random = torch.get_rng_state()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random, "step": step}

    try:
        into = {"model": model.state_dict(), "optimizer": None, "random": None, "step": None}
        found = manager.load("tiered:latest", into=into)
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["random"])
        first = found["step"]
    except FileNotFoundError:
        pass
    for step in range(first + 1, told["steps"] + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).pow(2).mean().backward()
        optimizer.step()
        if step % 3 == 0 or step % 10 == 0:
            manager.save(f"step_{step}", state())
        if step == told.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    tiers.close()
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.numpy().tobytes())
    with open(told["answer"] + ".new", "w") as file:
        json.dump({"weights": weights.hexdigest(), "first": first}, file)
    os.rename(told["answer"] + ".new", told["answer"])
