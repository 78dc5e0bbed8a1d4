"""Trainings on a GPU, killed and resumed: by each strategy, and by NCCL where ranks are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("gpu_worker.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(
    ("strategy", "precision", "staging"),
    [
        ("auto", "32-true", "overlapped"),
        ("auto", "16-mixed", "eager"),
        ("auto", "16-mixed", "overlapped"),
        ("ddp", "bf16-mixed", "overlapped"),
        ("fsdp", "bf16-mixed", "eager"),
        ("fsdp2", "32-true", "overlapped"),
        ("fsdp2 full", "bf16-mixed", "eager"),
        ("loop", "32-true", "eager"),
    ],
)
def test_a_killed_training_resumes_on_the_gpu_as_if_nothing_had_happened(
    strategy, precision, staging, tmp_path, memory_dir
):
    def train(folder, **job):
        job |= {"strategy": strategy, "precision": precision, "staging": staging, "accelerator": "gpu", "steps": 23}
        job |= {"dirpath": str(tmp_path / folder), "memory_dir": f"{memory_dir}/{folder}"}
        os.makedirs(job["memory_dir"], exist_ok=True)
        # By cuBLAS, the same sums in each process.
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, "-W", "ignore", str(WORKER), json.dumps(job)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
        if "die_after" in job:
            assert done.returncode == -9, done.stderr[-4000:]
            return None
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    whole = train("whole")
    assert whole["from"] is None
    if staging == "overlapped":
        assert whole["overlapped"] >= 8
    train("killed", die_after=17)
    resumed = train("killed")
    # What is overlapped, or sharded, is committed a moment after its step.
    late = staging == "overlapped" or strategy == "fsdp"
    assert resumed["from"] in [[16, "memory"]] + [[14, "memory"]] * late
    assert resumed["weights"] == whole["weights"]
    assert resumed.get("loss") == whole.get("loss")
