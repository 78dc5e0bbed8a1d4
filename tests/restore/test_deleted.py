"""Deletes by the owner of a durable tier, by hand or a lifecycle rule: no node resumes from these checkpoints."""

import shutil

import fsspec
from support.supporting import build
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.cli import app


def test_a_run_whose_folder_was_deleted_starts_anew_until_it_is_uploaded_again(memory_dir, tmp_path, caplog):
    options = {"dirpath": str(tmp_path / "run"), "memory_dir": memory_dir, "namespace": "deleted", "drain": "thread"}
    io = build(TieredCheckpointIO, **options)
    for step in (1, 2, 3):
        io.save_checkpoint({"global_step": step}, f"{step}.ckpt")
    shutil.rmtree(tmp_path / "run")
    assert not io.load_checkpoint("tiered:latest")
    assert "3.ckpt is only in node memory, as it was deleted from " in caplog.text
    assert "it is skipped; upload it again by: tiered-ckpt flush" in caplog.text
    io.teardown()
    assert CliRunner().invoke(app, ["flush", "3.ckpt", "--memory-dir", memory_dir]).exit_code == 0
    assert build(TieredCheckpointIO, **options).load_checkpoint("tiered:latest")["global_step"] == 3


def test_what_ended_with_its_process_was_not_deleted(memory_dir):
    for step in range(3):
        io = build(TieredCheckpointIO, dirpath="memory://ended", memory_dir=memory_dir)
        assert io.load_checkpoint("tiered:latest").get("global_step", 0) == step
        io.save_checkpoint({"global_step": step + 1}, f"{step + 1}.ckpt")
        io.teardown()
        fsspec.filesystem("memory").store.clear()
