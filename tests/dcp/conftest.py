"""Ranks of a job that saves and loads sharded checkpoints."""

import os
from pathlib import Path

import pytest
from support.launch import launch

WORKER = Path(__file__).with_name("worker.py")

DEADLINE_S = 75.0


@pytest.fixture
def ranks(tmp_path, memory_dir):
    """Runs steps of ``worker.py`` on so many ranks; gives the answers, by rank and step."""

    def run(count, *steps, nodes="", of_rank=None, **options):
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
        return launch(tmp_path, jobs, deadline_s=DEADLINE_S, worker=WORKER)

    return run
