"""Starts ranks by forking: importing torch takes longer than all else that most of them do.

Imports the modules that it is told of as well. Reads one request a line from its input (see ``launch.py``), forks a
process for each job, which runs the worker as its main module, and tells the processes' ids, and how each ended, a line
each.
"""

import importlib
import json
import os
import runpy
import sys
import traceback
import warnings

# Nothing that a rank has to start by itself is started here: no thread, no process group.
import lightning.pytorch  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from warm import warm_up

import tiered_checkpoint_io.callbacks
import tiered_checkpoint_io.dcp
import tiered_checkpoint_io.stores.s3
import tiered_checkpoint_io.strategies  # noqa: F401


def become(job):
    os.environ.clear()
    os.environ.update(job["environment"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    sys.argv = [job["worker"], job["argument"]]
    sys.path.insert(0, os.path.dirname(job["worker"]))
    try:
        runpy.run_path(job["worker"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.argv[1:]:
            importlib.import_module(name)
    warm_up()
    for line in sys.stdin:
        ranks = {}
        for rank, job in enumerate(json.loads(line)):
            pid = os.fork()
            if pid == 0:
                become(job)
            ranks[pid] = rank
        print(json.dumps({"pids": list(ranks)}), flush=True)
        while ranks:
            pid, _ = os.wait()
            print(json.dumps({"ended": ranks.pop(pid)}), flush=True)


if __name__ == "__main__":
    main()
