"""Scripts of benchmarks that only a person runs, or `make bench` late, run to their end and print their ratios."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("script", "mebibytes", "last"),
    [
        ("stall", 16, "stall_ratio_to_memcpy="),
        ("sharded", 16, "sharded_stall_ratio_to_dcp_thread="),
        ("recovery", 16, "recovery_ratio_to_s3="),
        ("replication", 16, '{"ways": '),
        ("first", 16, '{"ways": '),
        ("restore", 16, "restore_memory_ratio_to_memcpy="),
    ],
)
def test_it_runs_to_its_end(script, mebibytes, last):
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / f"{script}.py"), "--rounds", "1"]
    done = subprocess.run(
        [*command, "--mebibytes", str(mebibytes)], capture_output=True, text=True, timeout=150, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(last)
