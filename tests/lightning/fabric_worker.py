"""One rank of examples/fabric.py; a JSON object describes the work."""

import hashlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from support.supporting import build

EXAMPLE = Path(__file__).parents[2] / "examples" / "fabric.py"
GRID = 2.0**16

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    setup = Fabric.setup

    def exact(fabric, module, *optimizers, **options):
        for parameter in module.parameters():
            # DDP adds up in another order behind the first step of a process; sums of such few digits are exact.
            parameter.register_hook(lambda gradient: (gradient * GRID).round() / GRID)
        return setup(fabric, module, *optimizers, **options)

    Fabric.setup = exact
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    save = example["save"]
    saved = []

    def saving(fabric, io, state):
        save(fabric, io, state)
        saved.append(state["step"])
        if state["step"] == job.get("die_after"):
            fabric.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    intervals = {"MEMORY_EVERY": job["memory_every"], "DURABLE_EVERY": job["durable_every"]}
    example["train"].__globals__.update(intervals, save=saving)
    how = {"steps": job["steps"], "step_s": 0, "devices": job["devices"], **job["options"]}
    model = build(example["train"], job["dirpath"], **how)
    weights = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        weights.update(name.encode() + value.numpy().tobytes())
    with open(job["answer"] + ".new", "w") as file:
        json.dump({"weights": weights.hexdigest(), "first": saved[0]}, file)
    os.rename(job["answer"] + ".new", job["answer"])
