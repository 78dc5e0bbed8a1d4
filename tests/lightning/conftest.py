"""Fixtures for trainings: one job on a directory, on S3, or on each; in this process, or on ranks of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import launch, said
from support.training import Runs

WORKER = Path(__file__).with_name("worker.py")
LAUNCH_S = 100


@pytest.fixture(autouse=True)
def _handlers():
    """Gives the signal handlers back, which Lightning leaves where the end of a strategy fails."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def runs(tmp_path, memory_dir):
    return Runs(str(tmp_path / "durable"), memory_dir, tmp_path)


@pytest.fixture(params=[pytest.param("directory", marks=pytest.mark.matrix), "s3"])
def runs_on_each(request, tmp_path, memory_dir):
    dirpath = request.getfixturevalue("s3_url") if request.param == "s3" else str(tmp_path / "durable")
    return Runs(dirpath, memory_dir, tmp_path)


@pytest.fixture
def fits(tmp_path, memory_dir, monkeypatch):
    """Runs fits of ``worker.py`` on ``ranks`` ranks, one after the other; returns each rank's answer to each fit."""
    monkeypatch.chdir(tmp_path)

    def fits(*jobs, ranks=2, fails=False, **common):
        common = {"strategy": "fsdp2", "ranks": ranks, "dirpath": str(tmp_path / "durable"), **common}
        options = {"fits": [{"memory_dir": memory_dir, **common, **job} for job in jobs]}
        answers = launch(tmp_path, [options] * ranks, worker=WORKER, deadline_s=LAUNCH_S)
        if common.get("signal") == "SIGKILL":
            assert answers == [None] * ranks
            return []
        for rank, answer in enumerate(answers):
            assert answer is not None, said(tmp_path, rank)
            assert ("error" in answer[-1]) == fails, said(tmp_path, rank)
            for each in answer:
                # JSON knows no numbers as keys.
                each["losses"] = {int(step): loss for step, loss in each.get("losses", {}).items()}
        return list(zip(*answers, strict=True))

    return fits


@pytest.fixture
def whole(tmp_path):
    """Returns an uninterrupted training with another dirpath."""
    return {"steps": 8, "dirpath": str(tmp_path / "whole")}


@pytest.fixture
def launched(tmp_path, memory_dir):
    """Runs one fit of ``worker.py`` on ranks that Lightning starts; returns the process that started them."""

    def launched(**options):
        options = {
            "ranks": 2,
            "dirpath": str(tmp_path / "durable"),
            "memory_dir": memory_dir,
            "launched": True,
            **options,
        }
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.run(
            [sys.executable, str(WORKER), json.dumps({"fits": [options]})],
            capture_output=True,
            text=True,
            timeout=LAUNCH_S,
            check=False,
            env={**environment, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )

    return launched
