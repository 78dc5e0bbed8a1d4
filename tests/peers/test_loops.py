"""A training loop with Fabric: what rank 0 saves is in the memory of its peer as well."""

import os
from pathlib import Path

import pytest
from support.launch import launch, said
from support.losing import lose_memory

WORKER = Path(__file__).with_name("loop_worker.py")
LAUNCH_TIMEOUT_S = 60
pytestmark = pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S)


def test_a_lost_node_resumes_from_its_peers_memory(tmp_path, memory_dir):
    def run(*, resumes):
        jobs = []
        for node in "ab":
            os.makedirs(f"{memory_dir}/{node}", exist_ok=True)
            options = {"dirpath": str(tmp_path / "run"), "memory_dir": f"{memory_dir}/{node}", "replication_factor": 2}
            jobs.append({"resumes": resumes, "options": {**options, "on_save_error": "raise"}})
        answers = launch(tmp_path, jobs, worker=WORKER, deadline_s=LAUNCH_TIMEOUT_S)
        for rank, answer in enumerate(answers):
            assert answer is not None, said(tmp_path, rank)
        return answers

    run(resumes=False)
    lose_memory(f"{memory_dir}/a")
    step, tier = run(resumes=True)[0]["from"]
    assert (step, tier) == (1, "peer")
