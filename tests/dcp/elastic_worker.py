"""A rank under torchrun that saves local checkpoints: each attempt resumes from the latest one.

Writes what it has done to a file of its own, a line of JSON each. Rank 1 dies in the first attempt.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.supporting import build

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.errors import CheckpointNotFoundError


def main(folder, memory_dir, dies_at, last):
    dist.init_process_group("gloo")
    log = Path(folder, f"rank-{dist.get_rank()}.jsonl")
    is_first = not log.exists()

    def say(**facts):
        with log.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    options = {"dirpath": f"{folder}/durable", "memory_dir": memory_dir, "drain": "thread", "wait_timeout_s": 30}
    state, step = {"x": torch.zeros(4)}, 0
    try:
        step = build(dcp.load, state, kind="local", **options).opened.step
    except CheckpointNotFoundError:
        pass
    say(loaded=step, x=state["x"][0].item())
    while step < last:
        step += 1
        dist.all_reduce(torch.ones(1))
        state["x"] += 1
        report = build(dcp.save, state, checkpoint_id=f"step_{step}", kind="local", on_save_error="raise", **options)
        say(saved=step, save_id=report.save_id)
        if (step, dist.get_rank(), is_first) == (dies_at, 1, True):
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
