"""A training under torchrun that saves local checkpoints: each attempt resumes from the latest one.

Each rank writes what it has done to a file of its node, a line of JSON each.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.supporting import build

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.errors import CheckpointNotFoundError

LAST = 5


def main(node, durable, log, pause_at):
    def say(**facts):
        with open(log, "a") as file:
            file.write(json.dumps({"rank": dist.get_rank(), **facts}) + "\n")

    dist.init_process_group("gloo")
    options = {"dirpath": durable, "memory_dir": node, "drain": "thread", "namespace": "elastic", "wait_timeout_s": 30}
    options["on_save_error"] = "raise"
    state, step = {"x": torch.zeros(4)}, 0
    try:
        reader = build(dcp.load, state, kind="local", **options)
        step = reader.opened.step
    except CheckpointNotFoundError:
        pass
    say(loaded=step, x=state["x"][0].item(), restarts=os.environ["TORCHELASTIC_RESTART_COUNT"])
    while step < LAST:
        step += 1
        dist.all_reduce(torch.ones(1))
        state["x"] += 1
        report = build(dcp.save, state, checkpoint_id=f"step_{step}", kind="local", **options)
        say(saved=step, save_id=report.save_id)
        while step == pause_at and os.path.exists(f"{log}.pause"):
            time.sleep(0.05)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:4], pause_at=int(sys.argv[4]))
