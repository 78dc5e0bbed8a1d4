"""Signals to a whole group of processes, as launchers and Slurm send them: workers of DataLoaders are in it."""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from support.training import durable
from torch.utils.data import DataLoader

from tiered_checkpoint_io.callbacks.loader_workers import DeafWorkers

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


def test_only_workers_are_deaf_and_the_trainer_is_as_before(monkeypatch):
    heard = []
    start, before = BaseProcess.start, signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))

    def told_amid(process):
        start(process)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(BaseProcess, "start", told_amid)
    mask, deaf = signal.pthread_sigmask(signal.SIG_BLOCK, []), DeafWorkers([signal.SIGTERM])
    try:
        deaf.begin()
        batches = iter(DataLoader(torch.zeros(4, 1), num_workers=1, multiprocessing_context=context))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
        worker = batches._workers[0]
        os.kill(worker.pid, signal.SIGTERM)
        assert len([*batches]) == 4, "the worker works on"
        # Its descriptors go with it.
        popen = weakref.ref(worker._popen)
        gc.disable()
        del worker, batches
        assert popen() is None, "nothing waits for the garbage collector"
        other = context.Process(target=lambda: os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, []) - mask)))
        other.start()
        other.join(20)
        assert other.exitcode == 0, "its signals are not blocked"
    finally:
        gc.enable()
        deaf.end()
        signal.signal(signal.SIGTERM, before)
    assert BaseProcess.start is told_amid
    assert heard == ["TERM"] * 2, "what came during a start is delivered after it"


def test_trainings_that_end_in_another_order_than_they_began_leave_processes_as_they_were():
    start = BaseProcess.start
    first, second = DeafWorkers([signal.SIGTERM]), DeafWorkers([signal.SIGUSR1])
    first.begin()
    second.begin()
    first.end()
    try:
        batches = iter(DataLoader(torch.zeros(4, 1), num_workers=1, multiprocessing_context="fork"))
        os.kill(batches._workers[0].pid, signal.SIGUSR1)
        assert len([*batches]) == 4, "the second training's worker works on"
    finally:
        second.end()
    assert BaseProcess.start is start
