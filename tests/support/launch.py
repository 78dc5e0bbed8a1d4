"""Starts one process a rank, waits within a bound, and leaves none behind."""

import atexit
import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

WORKER = Path(__file__).parent.parent / "distributed" / "worker.py"
DEADLINE_S = 150.0
_READY_S = 120.0


def free_port():
    """A port that nobody listens on, and that no connection is made from.

    From those that the system gives to connections, one may be given to who tries to reach it before anybody
    listens there: such a rank is connected to itself, and waits for ever.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


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
        self._told = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def _listen(self):
        for line in self._process.stdout:
            self._told.put(json.loads(line))
        self._told.put(None)

    def run(self, jobs, deadline_s):
        """Runs one process for each job; gives the index of one that had to be killed, else None."""
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        # The first time, it is still importing.
        pids = self._hear(_READY_S)["pids"]
        running = set(range(len(jobs)))
        end = time.monotonic() + deadline_s
        late = None
        try:
            while running:
                running.discard(self._hear(max(0.1, end - time.monotonic()))["ended"])
        except queue.Empty:
            late = min(running)
        finally:
            for rank in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
            while running:
                running.discard(self._hear(_READY_S)["ended"])
        return late

    def _hear(self, timeout_s):
        told = self._told.get(timeout=timeout_s)
        if told is None:
            raise AssertionError("the process that starts ranks has ended")
        return told

    def close(self):
        self._process.stdin.close()
        self._process.wait()


_zygotes = {}


def zygote(preload=()):
    if preload not in _zygotes:
        _zygotes[preload] = Zygote(preload)
    return _zygotes[preload]


def zygote_pids():
    """Children of this process that outlive a test by design."""
    return {each.pid for each in _zygotes.values()}


def launch(folder, jobs, *, deadline_s=DEADLINE_S, worker=WORKER, preload=()):
    """Runs ``worker.py``, or another, once per job.

    Args:
        folder: Where the workers' answers and logs lie.
        jobs: What each rank is to do, by rank; see ``worker.py``.
        deadline_s: When all must be done, seconds.
        worker: The script that each rank runs.
        preload: Modules that all ranks need, and that take long to import.

    Returns:
        Each rank's answer; None for one that died without any.
    """
    folder = Path(folder)
    port = str(free_port())
    requests = []
    for rank, job in enumerate(jobs):
        answer = folder / f"answer-{rank}.json"
        answer.unlink(missing_ok=True)
        environment = {
            # What a test has set since the zygote was started holds as well.
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
        argument = json.dumps({**job, "answer": str(answer)})
        log = str(folder / f"log-{rank}.txt")
        requests.append({"environment": environment, "argument": argument, "log": log, "worker": str(worker)})
    late = zygote(preload).run(requests, deadline_s)
    assert late is None, f"rank {late} hangs; it said: {said(folder, late)}"
    return [answer_of(folder, rank) for rank in range(len(jobs))]


def answer_of(folder, rank):
    path = Path(folder, f"answer-{rank}.json")
    return json.loads(path.read_text()) if path.exists() else None


def said(folder, rank):
    return Path(folder, f"log-{rank}.txt").read_text()[-8000:]
