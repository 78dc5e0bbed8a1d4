"""A worker of examples/ray_train.py, with a small mock of the functions of ``ray.train`` that the example calls.

Ray itself is not installed: the mock returns rank and size, wraps the model in DDP, and notes reports.
"""

import json
import os
import runpy
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def stand_in(reports):
    """Puts modules of Ray's names in place; ``reports`` gets what the worker reports."""
    ray, train, for_torch = (ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    train.get_context = lambda: SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: size)
    train.report = reports.append
    for_torch.prepare_model = torch.nn.parallel.DistributedDataParallel
    ray.train, train.torch = train, for_torch
    sys.modules.update({each.__name__: each for each in (ray, train, for_torch)})


def work():
    try:
        example["loop"](job["config"])
    except BaseException as error:
        # The other worker has died: Ray ends this one.
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


if __name__ == "__main__":
    job, reports = json.loads(sys.argv[1]), []
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    stand_in(reports)
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    # Not on the main thread, as in Ray.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with open(job["answer"] + ".new", "w") as file:
        json.dump(reports, file)
    os.rename(job["answer"] + ".new", job["answer"])
