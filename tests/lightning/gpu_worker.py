"""A loop on a GPU with FSDP2 and without Lightning, whose ranks have only NCCL; it reads and answers JSON objects."""

import contextlib
import hashlib
import json
import os
import signal
import sys

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.fsdp import fully_shard

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.errors import CheckpointNotFoundError


def train(*, dirpath, memory_dir, steps, die_after=0, device="cuda"):
    places = {"dirpath": dirpath, "memory_dir": memory_dir}
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=0, world_size=1, store=torch.distributed.HashStore())
    torch.manual_seed(1)
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
        reader = dcp.load(loaded, **places)
        model, moments, step = loaded["model"], loaded["optimizer"], loaded["step"]
        dcp_state.set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
        came = [step, reader.tier]
    while step < steps:
        optimizer.zero_grad()
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
        (net(batch) - batch).pow(2).mean().backward()
        optimizer.step()
        step += 1
        if step % 2 == 0:
            dcp.async_save(state(), checkpoint_id=f"step_{step}", save_to_s3=step % 10 == 0, **places).result()
        if step == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        weights.update(name.encode() + value.full_tensor().cpu().numpy().tobytes())
    dcp.maybe_finalize_async_calls(blocking=True)
    torch.distributed.destroy_process_group()
    return {"weights": weights.hexdigest(), "from": came}


if __name__ == "__main__":
    print(json.dumps(train(**json.loads(sys.argv[1]))))
