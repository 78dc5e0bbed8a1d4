"""Runs a part of the package in a process of its own and kills it, SIGKILL, at its n-th effect.

As a program this is a *zygote*: it has imported everything, and forks one process for each order
that it reads, one JSON line each, so that dozens of deaths cost no start of Python. An effect is a
change of the file system, or a request to S3; the process dies behind it, before it hears of it.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

TESTS = Path(__file__).parents[1]
#: A process that neither ends nor dies by then is a failure of its own.
PATIENCE_S = 60
CHANGES = ("rename", "replace", "unlink")


class Counter:
    """Counts effects, says what they were, and kills the process behind the one that it was told."""

    def __init__(self, kill_at):
        self.kill_at = kill_at
        self.effects = []
        self._lock = threading.Lock()

    def effect(self, what):
        # The heartbeat's effects come by the clock; without them a run is the same every time.
        if threading.current_thread().name == "tiered-heartbeat":
            return
        with self._lock:
            self.effects.append(what)
            if len(self.effects) == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def behind(self, call, describe):
        @functools.wraps(call)
        def counted(*args, **options):
            result = call(*args, **options)
            self.effect(describe(args))
            return result

        return counted


def install(counter):
    for name in CHANGES:
        setattr(os, name, counter.behind(getattr(os, name), lambda args: str(args[-1])))
    from botocore.client import BaseClient

    BaseClient._make_api_call = counter.behind(BaseClient._make_api_call, lambda args: f"s3:{args[1]}")


# ------------------------------------------------------------------------------------------ roles
def run_drain(order):
    """Carries out what is queued."""
    from tiered_checkpoint_io.engine.drain import Drain

    assert Drain(Path(order["root"])).run(once=True)


def run_trainer(order):
    """Saves, aliases and deletes, while a drain works beside it in a thread."""
    import logging

    from support import story

    from tiered_checkpoint_io.config import TieredCheckpointConfig
    from tiered_checkpoint_io.engine.queue import Request
    from tiered_checkpoint_io.engine.saver import Facts, Saver
    from tiered_checkpoint_io.engine.supervise import DrainHandle
    from tiered_checkpoint_io.image import plan
    from tiered_checkpoint_io.storage.memory import MemoryTier

    dirpath = order["dirpath"]
    tier = MemoryTier.open(order["memory_dir"], "default")
    config = TieredCheckpointConfig.from_any(dirpath=dirpath, memory_dir=order["memory_dir"], drain="thread")
    saver, handle = Saver(tier, keep_last=1), DrainHandle(tier, config, logging.getLogger("trainer"))
    handle.start()
    for number, (action, name, target) in enumerate(story.OPERATIONS, start=1):
        if action == "save":
            facts = Facts(name, story.op_id(number), number, 0, 1, 0, dirpath, durable=True)
            saver.save(plan(story.state(number)), facts)
        else:
            handle.submit(Request(story.op_id(number), action, name, dirpath, target))
        if number % 4 == 0:
            handle.flush(PATIENCE_S)
    saver.close()
    handle.close(timeout_s=PATIENCE_S)
    tier.close()


ROLES = {"drain": run_drain, "trainer": run_trainer}


# ----------------------------------------------------------------------------------------- zygote
def child(order, report):
    signal.alarm(PATIENCE_S)
    os.environ.update(order["env"])
    counter = Counter(order["kill_at"])
    error = ""
    install(counter)
    try:
        ROLES[order["role"]](order)
    except BaseException:
        error = traceback.format_exc()
    with open(report, "wb") as file:
        file.write(json.dumps({"effects": counter.effects, "error": error[-3000:]}).encode())
    os._exit(0)


def main():
    import torch  # noqa: F401
    from support import story  # noqa: F401

    from tiered_checkpoint_io.engine import drain, saver, supervise  # noqa: F401
    from tiered_checkpoint_io.storage import s3  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            child(order, write)
        os.close(write)
        with open(read, "rb") as report:
            said = report.read()
        _, status = os.waitpid(pid, 0)
        answer = {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, **json.loads(said or b"{}")}
        print(json.dumps(answer), flush=True)


class Zygote:
    """The test's end of it."""

    def __init__(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    def run(self, role, *, kill_at=0, **order):
        """Runs a role; gives its effects as text, or None where it was killed as ordered."""
        env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self._process.stdin.write(json.dumps({"role": role, "kill_at": kill_at, "env": env, **order}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["signal"] == signal.SIGKILL:
            return None
        assert not answer["signal"], f"ended by signal {answer['signal']}"
        assert not answer["error"], answer["error"]
        return answer["effects"]

    def close(self):
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
