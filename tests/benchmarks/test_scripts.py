"""The benchmarks run to their end: the suite, the script for machines with a GPU, and those that only a person runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.matrix


def bench(script, *options, **environment):
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / f"{script}.py"), "--rounds", "1", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("stall", "stall_ratio_to_memcpy="),
        ("sharded", "sharded_stall_ratio_to_dcp_thread="),
        ("recovery", "recovery_ratio_to_s3="),
        ("replication", '{"ways": '),
        ("first", '{"ways": '),
        ("restore", "restore_memory_ratio_to_memcpy="),
    ],
)
def test_a_script_prints_its_ratio(script, last):
    assert bench(script, "--mebibytes", "16")[-1].startswith(last)


def test_the_script_for_gpus_restores_what_it_saved_and_prints_its_ratios():
    *_, figures, last = bench("gpu", "--mebibytes", "8", "--device", "cpu", "--no-fit")
    found = json.loads(figures)
    assert len(found["first_saves_s"]) == 3
    assert {"ours, memory step", "torch.save to tmpfs"} <= set(found["saves"])
    ways = {"copy from pinned memory", "ours, dcp.load", "ours, dcp.load without pinned buffers"}
    assert {*ways, "ours, load_checkpoint and copy"} <= set(found["restores"])
    assert last.startswith("gpu_stall_ratio_to_pinned_copy=")


def test_the_suite_shows_ours_beside_others_and_those_that_could_not_run(tmp_path):
    told = tmp_path / "bench.json"
    # NeMo is absent here, whatever is installed.
    (tmp_path / "nemo.py").write_text("raise ImportError('no NeMo')\n")
    options = [
        "--no-scripts",
        "--mebibytes=1",
        "--only",
        "ours, memory step",
        "NeMo S3CheckpointIO",
        "--json",
        str(told),
    ]
    lines = bench("bench", *options, PYTHONPATH=str(tmp_path))
    ours, absent = json.loads(told.read_text())["rows"]
    assert "error" in absent and any("could not run" in line for line in lines)
    assert ours["tensors"] == 64 and ours["MiB"] == 1 and len(ours["stall"]) == 1
    assert ours["tmpfs_MiB"] >= 1 and ours["requests"] == [0], "a memory step asks nothing of S3"
    assert abs(sum(ours["parts"].values()) - ours["stall"][0]) < 1e-6, "the parts are those of the only round"
    assert lines[-1].startswith("goals_met=")
