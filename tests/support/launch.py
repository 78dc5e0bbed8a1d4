"""Starts one process a rank, waits within a bound, and leaves none behind."""

import atexit
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

DEADLINE_S = 150.0
_READY_S = 120.0


def free_port():
    """Returns a port without a listener, and from which no connection is made.

    The system may give one of its ports for connections to a rank that tries to reach it before there is a listener:
    such a rank is connected to itself, and waits for ever.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Forked:
    """A process that the zygote has forked."""

    def __init__(self, zygote):
        self.pid = None
        self.returncode = None
        self._zygote = zygote
        self._heard = threading.Condition()

    def hear(self, *, pid=None, status=None):
        with self._heard:
            self.pid, self.returncode = pid or self.pid, self.returncode if status is None else status
            self._heard.notify_all()

    def started(self):
        """Waits until it runs; the first time, the zygote is still importing."""
        self._until(lambda: self.pid is not None, _READY_S)
        return self

    def wait(self, timeout_s):
        """Returns the status of an ended rank, negative for a signal; None if that takes longer."""
        self._until(lambda: self.returncode is not None, timeout_s)
        return self.returncode

    def _until(self, is_it, timeout_s):
        with self._heard:
            self._heard.wait_for(lambda: is_it() or self._zygote.has_ended, timeout_s)
            assert is_it() or not self._zygote.has_ended, "the process that starts ranks has ended"

    def signal(self, number):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        assert self.wait(_READY_S) is not None, f"process {self.pid} does not die"


class Zygote:
    """The process that ranks are forked from; one for all tests of this process."""

    def __init__(self, preload=()):
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self.pid = self._process.pid
        self.has_ended = False
        self._forked = []
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def _listen(self):
        for line in self._process.stdout:
            message = json.loads(line)
            self._forked[message.pop("number")].hear(**message)
        self.has_ended = True
        for each in self._forked:
            each.hear()

    def start(self, worker, *arguments, environment, out, err=None, cwd=None):
        """Starts a process that runs a script; ``out`` and ``err`` are files."""
        job = {"number": len(self._forked), "worker": str(worker), "arguments": arguments, "environment": environment}
        job |= {"out": str(out), "err": str(err or out), "cwd": str(cwd or os.getcwd())}
        self._forked.append(Forked(self))
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._forked[-1]

    def close(self):
        self._process.stdin.close()
        self._process.wait()


_zygotes = {}


def zygote(preload=()):
    if preload not in _zygotes:
        _zygotes[preload] = Zygote(preload)
    return _zygotes[preload]


def zygote_pids():
    """Returns the ids of children of this process that outlive a test by design."""
    return {each.pid for each in _zygotes.values()}


def launch(folder, jobs, *, worker, deadline_s=DEADLINE_S, preload=()):
    """Runs a script once per job.

    Args:
        folder: Folder of the workers' answers and logs.
        jobs: Steps of each rank, by rank.
        worker: The script that each rank runs.
        deadline_s: When all must be done, seconds.
        preload: Modules that all ranks need, and that take long to import.

    Returns:
        Each rank's answer; None for one that died without any.
    """
    folder = Path(folder)
    port = str(free_port())
    ranks = []
    for rank, job in enumerate(jobs):
        answer = folder / f"answer-{rank}.json"
        answer.unlink(missing_ok=True)
        environment = {
            # Variables that a test has set since the zygote's start hold as well.
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            # By which Lightning knows that it need not start the others.
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(jobs)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        # Nodes are simulated by memory folders of their own; a job may say otherwise.
        simulated = job.get("machine") or job.get("options", {}).get("memory_dir")
        environment |= {"TIERED_CHECKPOINT_MACHINE": simulated} if simulated else {}
        argument = json.dumps({**job, "answer": str(answer)})
        log = folder / f"log-{rank}.txt"
        ranks.append(zygote(preload).start(worker, argument, environment=environment, out=log))
    late = late_of(ranks, deadline_s)
    assert late is None, f"rank {late} hangs; it said: {said(folder, late)}"
    return [answer_of(folder, rank) for rank in range(len(jobs))]


def late_of(processes, deadline_s):
    """Waits until all have ended; returns the index of the first that had to be killed, else None."""
    try:
        for each in processes:
            each.started()
        end = time.monotonic() + deadline_s
        statuses = [each.wait(max(0.0, end - time.monotonic())) for each in processes]
        return next((index for index, status in enumerate(statuses) if status is None), None)
    finally:
        for each in processes:
            if each.pid is not None:
                each.kill()


def scripts(folder, script, *of_each, deadline_s=DEADLINE_S, cwd=None):
    """Runs a script once for each pair of arguments and environment, at once, as ``python SCRIPT`` would, less the imports.

    Returns:
        Results of each: status, output, errors.
    """
    started, files = [], []
    for number, (arguments, environment) in enumerate(of_each):
        files.append((Path(folder, f"out-{number}.txt"), Path(folder, f"err-{number}.txt")))
        out, err = files[-1]
        started.append(zygote().start(script, *arguments, environment=environment, out=out, err=err, cwd=cwd))
    late = late_of(started, deadline_s)
    assert late is None, f"process {late} hangs; it said: {files[late][1].read_text()[-8000:]}"
    return [
        subprocess.CompletedProcess(script, each.returncode, out.read_text(), err.read_text())
        for each, (out, err) in zip(started, files, strict=True)
    ]


def answer_of(folder, rank):
    path = Path(folder, f"answer-{rank}.json")
    return json.loads(path.read_text()) if path.exists() else None


def said(folder, rank):
    return Path(folder, f"log-{rank}.txt").read_text()[-8000:]
