"""One run of a training loop without a Trainer that neither loads nor looks, on a machine whose clock is behind."""

import json
import os
import sys
import time

import torch
from support.supporting import build

from tiered_checkpoint_io.clock import Clock


def save(kind, told):
    options = {key: told[key] for key in ("dirpath", "memory_dir", "namespace")}
    state = {"model": {"w": torch.full((100,), float(told["step"]))}, "global_step": told["step"]}
    if kind == "dcp":
        from tiered_checkpoint_io import dcp

        writer = build(dcp.TieredStorageWriter, step=told["step"], **options)
        dcp.save(state, checkpoint_id=told["name"], storage_writer=writer)
        writer.close()
        return
    from tiered_checkpoint_io import TieredCheckpointIO

    io = build(TieredCheckpointIO, **options)
    if told["memory_first"]:
        io.save_checkpoint(state, "in-memory.ckpt", {"tiers": ["memory"]})
    io.save_checkpoint(state, told["name"])
    io.teardown()


def main():
    told = json.loads(sys.argv[1])
    Clock.wall = lambda _: time.time() - told["behind_s"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    save(told["kind"], told)
    with open(told["answer"], "w") as file:
        json.dump("saved", file)


if __name__ == "__main__":
    main()
