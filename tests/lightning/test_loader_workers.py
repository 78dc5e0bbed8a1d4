"""Signals to a whole group of processes, as launchers and Slurm send them: workers of DataLoaders are in it."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.training import durable

WORKER = Path(__file__).with_name("loader_worker.py")
further = functools.partial(pytest.param, marks=pytest.mark.matrix)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("starts", "persists", "number"),
    [
        ("fork", False, signal.SIGTERM),
        ("spawn", True, signal.SIGTERM),
        further("fork", True, signal.SIGTERM),
        further("spawn", False, signal.SIGUSR1),
    ],
)
def test_a_signal_to_all_processes_of_a_rank_leaves_it_the_workers_for_its_last_batch(
    tmp_path, memory_dir, starts, persists, number
):
    """And workers that are still there when the process ends do not keep it from that."""
    told = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "ready": str(tmp_path / "ready")}
    command = [sys.executable, str(WORKER), json.dumps({**told, "starts": starts, "persists": persists})]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.02)
        os.killpg(process.pid, number)
        status = process.wait(40)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path / "log").read_text()
    assert status == 128 + number, said
    assert "the last checkpoint is on the durable tier" in said
    assert durable(told["dirpath"]) == ["preempted.ckpt"]
    assert "DataLoader worker" not in said
    assert "Exception ignored" not in said
