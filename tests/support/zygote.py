"""Starts ranks by forking: importing torch takes longer than all else that most of them do.

Imports given modules as well. Reads one job a line from its input (see ``launch.py``), forks a process that runs the
job's script as its main module, and prints that process' id, and later its end, a line each.
"""

import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import traceback
import warnings

# A rank starts its threads and process groups by itself: none is started here.
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


def become(job, files):
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(job["environment"])
    for descriptor, target in zip(files, (0, 1, 2), strict=True):
        os.dup2(descriptor, target)
    os.chdir(job["cwd"])
    sys.argv = [job["worker"], *job["arguments"]]
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:0] = [os.path.dirname(job["worker"]), tests]
    try:
        runpy.run_path(job["worker"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fork(job):
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    err = os.open(job["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if job["err"] != job["out"] else os.dup(out)
    pid = os.fork()
    if pid == 0:
        become(job, (nothing, out, err))
    for descriptor in (nothing, out, err):
        os.close(descriptor)
    return pid


def tell(**said):
    print(json.dumps(said), flush=True)


def ended():
    """Processes that have ended since the last time, and their statuses."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        pass


def main():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.argv[1:]:
            importlib.import_module(name)
    warm_up()
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers, rest = {}, b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if key.fd == woken:
                    for pid, status in ended():
                        tell(number=numbers.pop(pid), status=status)
                    continue
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for job in map(json.loads, lines):
                    pid = fork(job)
                    numbers[pid] = job["number"]
                    tell(number=job["number"], pid=pid)


if __name__ == "__main__":
    main()
