"""The benchmarks run to their end: the suite, the script for machines with a GPU, and those that only a person runs; what they measure is still there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(script, *options, **environment):
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / f"{script}.py"), "--rounds", "1", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.matrix
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


@pytest.mark.matrix
def test_the_script_for_gpus_restores_what_it_saved_and_prints_its_ratios():
    *_, figures, last = bench("gpu", "--mebibytes", "8", "--device", "cpu", "--no-fit")
    found = json.loads(figures)
    assert len(found["first_saves_s"]) == 3
    assert {"ours, memory step", "torch.save to tmpfs"} <= set(found["saves"])
    ways = {"copy from pinned memory", "ours, dcp.load", "ours, dcp.load without pinned buffers"}
    assert {*ways, "ours, load_checkpoint and copy"} <= set(found["restores"])
    assert last.startswith("gpu_stall_ratio_to_pinned_copy=")


def test_the_parts_of_a_save_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from parts import OF_DCP_LOAD, OF_LOAD, OF_SAVE, OF_SHARDED, Parts

    for functions in (OF_SAVE, OF_LOAD, OF_DCP_LOAD, OF_SHARDED):
        for part, paths in functions.items():
            for path in paths:
                with Parts({part: [path]}) as found:
                    assert found.seconds == {part: 0.0}, f"{path} is gone"
