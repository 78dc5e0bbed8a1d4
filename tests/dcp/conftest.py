"""Ranks of a job that saves and loads sharded checkpoints."""

import os
from pathlib import Path

import pytest
from support.launch import launch
from support.supporting import supported

from tiered_checkpoint_io.engine.drain.log import read_events

WORKER = Path(__file__).with_name("worker.py")
SMP_WORKER = Path(__file__).with_name("smp_worker.py")

DEADLINE_S = 75.0


def failures(memory_dir):
    """Returns the failures in the record of the node: names, and the first words of why."""
    (root,) = {path.parent for path in Path(memory_dir).glob("tiered-*/*/events.jsonl")}
    failed = [each for each in read_events(root) if each["event"] == "failed"]
    return sorted((each["name"], each["action"], " ".join(each["error"].split()[:3])) for each in failed)


@pytest.fixture(autouse=True)
def drain_in_a_thread():
    """Runs drains in threads, which start faster; tests/drain and tests/crash have processes."""
    with supported(drain="thread"):
        yield


@pytest.fixture
def ranks(tmp_path, memory_dir):
    """Runs steps of ``worker.py`` on so many ranks; returns the answers, by rank and step."""

    def run(count, *steps, nodes="", of_rank=None, worker=WORKER, **options):
        options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "save_to_s3": False, **options}
        jobs = [{"options": options, "steps": steps}] * count
        if nodes:
            # Ranks of one node share a memory tier.
            for node in set(nodes):
                os.makedirs(f"{memory_dir}/{node}", exist_ok=True)
            jobs = [
                {**job, "options": {**options, "memory_dir": f"{memory_dir}/{nodes[r]}"}} for r, job in enumerate(jobs)
            ]
        for rank, more in (of_rank or {}).items():
            jobs[rank] = {**jobs[rank], "options": {**jobs[rank]["options"], **more}}
        return launch(tmp_path, jobs, deadline_s=DEADLINE_S, worker=worker)

    return run


@pytest.fixture
def job(ranks):
    """Runs steps of ``smp_worker.py``; each step's answers, by rank, None of one that died."""

    def run(count, *steps, **options):
        answers = ranks(count, *steps, worker=SMP_WORKER, **{"save_to_s3": None, **options})
        return [[answer[index] if answer else None for answer in answers] for index in range(len(steps))]

    return run
