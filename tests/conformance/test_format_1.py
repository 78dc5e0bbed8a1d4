"""Checkpoints of version 0.1.0, in format 1, load for ever: a full, a sharded (of two ranks) and a local one."""

import shutil
from pathlib import Path

import torch
from support.supporting import build
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO, dcp
from tiered_checkpoint_io.cli import app

DATA = Path(__file__).parents[1] / "data/format_1"


def test_a_checkpoint_of_each_kind_is_verified_and_loads(tmp_path, memory_dir):
    dirpath = str(tmp_path / "run")
    shutil.copytree(DATA, dirpath)
    verified = CliRunner().invoke(app, ["verify", dirpath])
    assert (verified.exit_code, verified.stdout.count("intact"), len(verified.stdout.splitlines())) == (0, 3, 4)
    options = {"dirpath": dirpath, "memory_dir": memory_dir, "drain": "thread"}
    io = build(TieredCheckpointIO, **options)
    loaded = {1: io.load_checkpoint("step_1.ckpt")}
    io.teardown()
    for step, kind in ((2, "sharded"), (3, "local")):
        loaded[step] = {"w": torch.zeros(4), "global_step": 0}
        build(dcp.load, loaded[step], checkpoint_id=f"step_{step}", kind=kind, **options).close()
    for step, state in loaded.items():
        assert torch.equal(state["w"], torch.arange(4.0) + step)
        assert state["global_step"] == step
