"""The script for machines with a GPU runs to its end without one, so that it works where it is meant for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.matrix
def test_the_script_restores_what_it_saved_and_prints_its_ratios():
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu"]
    command += ["--mebibytes", "8", "--rounds", "1", "--no-fit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *_, figures, last = done.stdout.splitlines()
    found = json.loads(figures)
    assert len(found["first_saves_s"]) == 3
    assert {"ours, memory step", "torch.save to tmpfs"} <= set(found["saves"])
    ways = {"copy from pinned memory", "ours, dcp.load", "ours, dcp.load without pinned buffers"}
    assert {*ways, "ours, load_checkpoint and copy"} <= set(found["restores"])
    assert last.startswith("gpu_stall_ratio_to_pinned_copy=")


@pytest.mark.matrix
def test_without_a_gpu_it_says_so():
    code = "import torch, runpy, sys; torch.cuda.is_available = lambda: False; sys.argv = ['gpu.py'];"
    code += "sys.path.insert(0, 'benchmarks'); runpy.run_path('benchmarks/gpu.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 2
    assert "this machine has no CUDA device; --device cpu only tries the script" in done.stderr
