"""Starts one process a rank, waits within a bound, and leaves none behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).parent.parent / "distributed" / "worker.py"
DEADLINE_S = 150.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(folder, jobs, *, cache=None, deadline_s=DEADLINE_S, worker=WORKER):
    """Runs ``worker.py``, or another, once per job.

    Args:
        folder: Where the workers' answers and logs lie.
        jobs: What each rank is to do, by rank; see ``worker.py``.
        cache: A folder for bytecode, where it is not kept elsewhere: compiling torch takes longer
            than all else here.
        deadline_s: When all must be done, seconds.
        worker: The script that each rank runs.

    Returns:
        Each rank's answer; None for one that died without any.
    """
    folder = Path(folder)
    port = str(free_port())
    processes = []
    try:
        for rank, job in enumerate(jobs):
            answer = folder / f"answer-{rank}.json"
            answer.unlink(missing_ok=True)
            environment = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(jobs)),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            if cache is not None and environment.pop("PYTHONDONTWRITEBYTECODE", None):
                environment["PYTHONPYCACHEPREFIX"] = str(cache)
            with open(folder / f"log-{rank}.txt", "wb") as log:
                command = [sys.executable, str(worker), json.dumps({**job, "answer": str(answer)})]
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                )
        end = time.monotonic() + deadline_s
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} hangs; it said: {said(folder, rank)}") from None
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
            process.wait()
    return [answer_of(folder, rank) for rank in range(len(jobs))]


def answer_of(folder, rank):
    path = Path(folder, f"answer-{rank}.json")
    return json.loads(path.read_text()) if path.exists() else None


def said(folder, rank):
    return Path(folder, f"log-{rank}.txt").read_text()[-2000:]
