"""Ray Train: the example, whose worker is killed without notice; needs Ray, which the project does not install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from ray_train import train

folder, die_at, memory_dir = sys.argv[2:]
train(folder + "/durable", folder, die_at=int(die_at), namespace=folder.rpartition("/")[2], memory_dir=memory_dir)
"""


@pytest.mark.matrix
@pytest.mark.timeout(1100)
def test_ray_starts_the_workers_again_and_they_resume_from_memory(tmp_path, memory_dir):
    # Not for the module: where nothing else is asked for, pytest would find no test and fail.
    pytest.importorskip("ray", reason="pip install 'ray[train]' in an environment of its own: docs/ray.md")

    def train(folder, die_at):
        (tmp_path / folder).mkdir()
        command = [sys.executable, "-c", RUN, EXAMPLES, tmp_path / folder, str(die_at), memory_dir]
        env = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env, cwd=EXAMPLES)
        said = ran.stdout + ran.stderr
        assert ran.returncode == 0, said[-5000:]
        return torch.load(tmp_path / folder / "weights.pt"), said

    whole, said = train("whole", 0)
    assert "resuming from" not in said
    resumed, said = train("killed", 37)
    assert "resuming from step=35.ckpt (memory" in said
    assert all(bool((resumed[name] == value).all()) for name, value in whole.items())
    assert sorted(path.name for path in (tmp_path / "killed" / "durable").glob("*.ckpt")) == [
        "step=20.ckpt",
        "step=40.ckpt",
    ]
