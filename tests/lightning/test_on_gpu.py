"""Trainings on a GPU, killed and resumed: by each strategy, and by NCCL if there are ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _same_sums_in_each_process(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize(
    ("strategy", "precision", "staging"),
    [
        ("auto", "32-true", "overlapped"),
        ("auto", "16-mixed", "eager"),
        ("auto", "16-mixed", "overlapped"),
        ("ddp", "bf16-mixed", "overlapped"),
        ("fsdp1", "bf16-mixed", "eager"),
        ("fsdp2", "32-true", "overlapped"),
        ("fsdp2 full", "bf16-mixed", "eager"),
    ],
)
def test_a_killed_training_resumes_on_the_gpu_as_if_nothing_had_happened(strategy, precision, staging, fits, tmp_path):
    told = {
        "strategy": strategy.split()[0],
        "full": strategy.endswith("full"),
        "gpu": precision,
        "steps": 23,
        "ranks": 1,
    }
    told["config"] = {"staging": staging, "s3_every_n_train_steps": 10, "drain": "process"}
    ((whole,),) = fits({"dirpath": str(tmp_path / "whole")}, **told)
    if staging == "overlapped":
        assert whole["overlapped"] >= 8
    fits({"signals": [[0, "train", 17]], "ckpt_path": None}, signal="SIGKILL", **told)
    ((resumed,),) = fits({}, **told)
    # An overlapped or sharded save is committed a moment after its step.
    late = staging == "overlapped" or strategy == "fsdp1"
    assert resumed["from"][1:] in [[16, "memory"]] + [[14, "memory"]] * late
    assert resumed["losses"] == {step: whole["losses"][step] for step in resumed["losses"]}


def test_a_killed_loop_of_plain_fsdp2_resumes_on_the_gpu_as_if_nothing_had_happened(tmp_path, memory_dir):
    def train(folder, **job):
        job |= {"dirpath": str(tmp_path / folder), "memory_dir": f"{memory_dir}/{folder}", "steps": 23}
        os.makedirs(job["memory_dir"], exist_ok=True)
        worker = str(Path(__file__).with_name("gpu_worker.py"))
        command = [sys.executable, "-W", "ignore", worker, json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert done.returncode == (-9 if "die_after" in job else 0), done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None

    whole = train("whole")
    train("killed", die_after=17)
    assert train("killed") == {"weights": whole["weights"], "from": [16, "memory"]}
