"""The benchmarks' suite runs to its end: a row for each contender, also for one that cannot run, and the goals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.matrix
def test_the_suite_tells_ours_beside_others_and_says_who_could_not_run(tmp_path):
    told = tmp_path / "bench.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--no-scripts", "--mebibytes=1", "--rounds=1"]
    command += ["--only", "ours, memory step", "NeMo S3CheckpointIO", "--json", str(told)]
    # NeMo is absent here, whatever is installed.
    (tmp_path / "nemo.py").write_text("raise ImportError('no NeMo')\n")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    ours, absent = json.loads(told.read_text())["rows"]
    assert "error" in absent and "could not run" in done.stdout
    assert ours["tensors"] == 64 and ours["MiB"] == 1 and len(ours["stall"]) == 1
    assert ours["tmpfs_MiB"] >= 1 and ours["requests"] == [0], "a memory step asks nothing of S3"
    assert abs(sum(ours["parts"].values()) - ours["stall"][0]) < 1e-6, "the parts are those of the only round"
    assert done.stdout.splitlines()[-1].startswith("goals_met=")
