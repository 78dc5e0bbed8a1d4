"""Lightning's Trainer with only the checkpoint IO, used as in the card's own example."""

import pytest
import torch
from support.training import Runs


@pytest.fixture
def runs(tmp_path, durable_dir, memory_dir, monkeypatch):
    # The folder of Lightning's default callback.
    monkeypatch.chdir(tmp_path)
    return Runs(durable_dir, memory_dir, tmp_path)


def test_the_io_alone_saves_each_epoch_and_resumes(runs):
    options = {"max_steps": -1, "enable_checkpointing": True, "asynchronous": False}
    runs.fit(io=runs.io(on_save_error="raise"), ckpt_path=None, max_epochs=2, **options)
    assert runs.durable() == ["epoch=1-step=40.ckpt"]
    resumed, _ = runs.fit(max_epochs=3, **options)
    assert resumed.io.checkpointer.restored.step == 40
    assert resumed.global_step == 60


def test_the_place_of_a_relative_name_is_logged_and_a_path_elsewhere_is_an_ordinary_file(runs, tmp_path):
    io = runs.io(log_dir=str(tmp_path / "logs"))
    trainer, _ = runs.fit(io=io, ckpt_path=None, max_steps=2, enable_checkpointing=False)
    trainer.save_checkpoint("x.ckpt")
    trainer.save_checkpoint(tmp_path / "elsewhere" / "y.ckpt")
    io.teardown()
    assert runs.durable() == ["x.ckpt"]
    assert torch.load(tmp_path / "elsewhere" / "y.ckpt", weights_only=False)["global_step"] == 2
    said = next((tmp_path / "logs").glob("*_checkpointing.log")).read_text()
    assert f"x.ckpt is {runs.dirpath}/x.ckpt" in said
    assert f"saved {tmp_path}/elsewhere/y.ckpt as an ordinary file" in said
    resumed, _ = runs.fit(ckpt_path=str(tmp_path / "elsewhere" / "y.ckpt"), max_steps=3, enable_checkpointing=False)
    assert resumed.global_step == 3


def test_the_tuners_scratch_is_not_resumed_from(runs):
    io = runs.io()
    state = {"state_dict": {}, "pytorch-lightning_version": "2.6.0", "optimizer_states": [], "global_step": 1}
    io.save_checkpoint(state, "step=1.ckpt")
    for name in (".lr_find_1a2b.ckpt", ".scale_batch_size_1a2b.ckpt"):
        io.save_checkpoint({**state, "global_step": 9}, f"{runs.dirpath}/{name}")
        assert io.load_checkpoint("tiered:latest")["global_step"] == 1
        assert io.load_checkpoint(name)["global_step"] == 9
    io.teardown()
