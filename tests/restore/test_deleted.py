"""Deletes by the owner of a durable tier, by hand or a lifecycle rule: no node resumes from these checkpoints."""

import os
import shutil

import fsspec
import pytest
from support.supporting import build
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.cli import app


@pytest.fixture
def job(tmp_path, memory_dir):
    """Makes a new IO of one run, after three saves; by default on the same node."""

    def made(folder=memory_dir):
        options = {"memory_dir": folder, "namespace": "deleted", "drain": "thread"}
        return build(TieredCheckpointIO, dirpath=str(tmp_path / "run"), **options)

    io = made()
    for step in (1, 2, 3):
        io.save_checkpoint({"global_step": step}, f"{step}.ckpt")
    io.teardown()
    return made


def test_a_run_whose_folder_was_deleted_starts_anew_until_it_is_uploaded_again(job, memory_dir, tmp_path, caplog):
    shutil.rmtree(tmp_path / "run")
    assert not job().load_checkpoint("tiered:latest")
    said = "3.ckpt is in node memory alone, and was deleted from "
    assert said in caplog.text and "to have it again, upload it by: tiered-ckpt flush" in caplog.text
    done = CliRunner().invoke(app, ["flush", "3.ckpt", "--memory-dir", memory_dir, "--namespace", "deleted"])
    assert done.exit_code == 0, done.output
    assert job().load_checkpoint("tiered:latest")["global_step"] == 3


@pytest.mark.parametrize("manifest", [True, False])
def test_all_nodes_take_the_one_before_what_was_deleted(job, memory_dir, tmp_path, caplog, manifest):
    for name in ("3.ckpt", *([".tiered/manifests/3.ckpt.json"] if manifest else [])):
        os.remove(tmp_path / "run" / name)
    for folder in (memory_dir, memory_dir + "/other"):
        os.makedirs(folder, exist_ok=True)
        assert job(folder).load_checkpoint("tiered:latest")["global_step"] == 2
    assert ("3.ckpt: its object 3.ckpt is gone" in caplog.text) is not manifest
    assert job().load_checkpoint("3.ckpt")["global_step"] == 3


def test_what_ended_with_its_process_was_not_deleted(memory_dir):
    for step in range(3):
        io = build(TieredCheckpointIO, dirpath="memory://ended", memory_dir=memory_dir)
        assert io.load_checkpoint("tiered:latest").get("global_step", 0) == step
        io.save_checkpoint({"global_step": step + 1}, f"{step + 1}.ckpt")
        io.teardown()
        fsspec.filesystem("memory").store.clear()
