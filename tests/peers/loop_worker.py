"""One rank, alone on its node, of a training loop without a Trainer; a JSON object says what it is to do."""

import json
import os
import sys
import time
from datetime import timedelta

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from support.supporting import build

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io import fabric as tiered_fabric

PATIENCE_S = 20.0


def by_fabric():
    io = build(TieredCheckpointIO, **told["options"])
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), timeout=timedelta(seconds=PATIENCE_S))
    fabric = Fabric(
        accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, plugins=[AsyncCheckpointIO(io)], loggers=[]
    )
    fabric.launch()
    state = {"model": fabric.setup_module(torch.nn.Linear(4, 4)), "step": 0}
    if told["resumes"]:
        fabric.load("tiered:latest", state)
    else:
        tiered_fabric.save(fabric, state, 1, tiers=["memory"])
    return io.checkpointer, io.teardown


def by_accelerate():
    from accelerate import Accelerator

    from tiered_checkpoint_io.huggingface import AcceleratorCheckpoints

    checkpoints, accelerator = build(AcceleratorCheckpoints, **told["options"]), Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(4, 4))
    if told["resumes"]:
        checkpoints.load(accelerator)
    else:
        checkpoints.save(accelerator, 1, tiers=["memory"])
    return checkpoints.checkpointer, checkpoints.close


def wait_for_copies(tier):
    """Until what rank 0 has saved is on its peer."""
    deadline = time.monotonic() + PATIENCE_S
    while not (tier.held() and all(each.replicated for each in tier.held())):
        assert time.monotonic() < deadline, "the checkpoint did not get to the peer"
        time.sleep(0.02)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"])
    os.environ.update(TORCHELASTIC_RUN_ID="loop", GROUP_WORLD_SIZE="2")
    checkpointer, close = {"fabric": by_fabric, "accelerate": by_accelerate}[told["loop"]]()
    restored = checkpointer.restored
    if not told["resumes"] and os.environ["RANK"] == "0":
        wait_for_copies(checkpointer.session.open().tier)
    torch.distributed.barrier()
    close()
    with open(told["answer"] + ".new", "w") as file:
        json.dump({"from": restored and (restored.step, restored.tier)}, file)
    os.rename(told["answer"] + ".new", told["answer"])
