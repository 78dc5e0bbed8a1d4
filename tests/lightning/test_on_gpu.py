"""Trainings on a GPU, killed and resumed: by each strategy, and by NCCL if there are ranks."""

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
    options = {
        "strategy": strategy.split()[0],
        "full": strategy.endswith("full"),
        "gpu": precision,
        "steps": 23,
        "ranks": 1,
    }
    options["config"] = {"staging": staging, "s3_every_n_train_steps": 10, "drain": "process"}
    ((whole,),) = fits({"dirpath": str(tmp_path / "whole")}, **options)
    if staging == "overlapped":
        assert whole["overlapped"] >= 8
    fits({"signals": [[0, "train", 17]], "ckpt_path": None}, signal="SIGKILL", **options)
    ((resumed,),) = fits({}, **options)
    # An overlapped or sharded save is committed a moment after its step.
    late = staging == "overlapped" or strategy == "fsdp1"
    assert resumed["from"][1:] in [[16, "memory"]] + [[14, "memory"]] * late
    assert resumed["losses"] == {step: whole["losses"][step] for step in resumed["losses"]}
