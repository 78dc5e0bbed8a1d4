"""No import needs what a user need not have; ``make dist`` looks at what is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code, *flags, cwd, **env):
    options = {"capture_output": True, "text": True, "timeout": 120, "env": {**os.environ, **env}}
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=cwd, **options)


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def test_names_need_no_package_of_s3_and_no_torch(tmp_path):
    code = BLOCK.format(blocked={"boto3", "botocore", "s3fs", "fsspec", "hydra", "omegaconf", "torch", "lightning"})
    code += "from tiered_checkpoint_io import find_latest, list_checkpoints, new_checkpoints\n"
    code += f"assert find_latest({str(tmp_path / 'none')!r}) is None\n"
    done = python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_dcp_saves_and_loads_without_lightning_and_what_commands_need(tmp_path, memory_dir):
    blocked = {"lightning", "pytorch_lightning", "omegaconf", "s3fs", "fsspec", "boto3", "rich", "typer"}
    # The drain, a process of its own, gets it as well.
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(blocked=blocked))
    code = f"""
import torch
from tiered_checkpoint_io import dcp
options = {{"dirpath": {str(tmp_path / "run")!r}, "memory_dir": {memory_dir!r}, "on_save_error": "raise"}}
dcp.save({{"w": torch.arange(9)}}, checkpoint_id="step_1", **options)
dcp.load(state := {{"w": torch.zeros(9, dtype=torch.int64)}}, checkpoint_id="step_1", **options)
assert state["w"].tolist() == list(range(9))
"""
    done = python(code, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr


@pytest.mark.matrix
def test_without_nemo_its_names_say_what_to_install(tmp_path):
    # A folder of that name is not NeMo.
    (tmp_path / "nemo").mkdir()
    code = """
import tiered_checkpoint_io.nemo
try:
    from tiered_checkpoint_io.nemo import S3CheckpointIO
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    done = python(code, "-W", "ignore", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nemo tiered_checkpoint_io.nemo needs NVIDIA NeMo")
    assert "pip install 'nemo_toolkit[core]'" in done.stdout
