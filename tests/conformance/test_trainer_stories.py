"""Lightning's Trainer with only the checkpoint IO, used as in the card's own example."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import Runs

from tiered_checkpoint_io.errors import ConfigError


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


def test_a_stock_checkpoint_without_a_dirpath_keeps_its_best_and_its_last(runs):
    callback = ModelCheckpoint(monitor="score", mode="max", save_top_k=1, every_n_train_steps=5, save_last="link")
    runs.fit(callback, ckpt_path=None)
    assert callback.best_model_path.startswith(f"{runs.dirpath}/epoch=0-step=")
    assert callback.last_model_path == f"{runs.dirpath}/last.ckpt"
    runs.wipe()
    io = runs.io()
    assert io.load_checkpoint(callback.best_model_path)["global_step"]
    assert io.load_checkpoint("tiered:last")["global_step"] == 20
    io.teardown()


def test_a_stock_checkpoint_with_a_dirpath_elsewhere_is_refused_before_the_first_batch(runs, tmp_path):
    with pytest.raises(
        ConfigError, match=r"ModelCheckpoint\(dirpath='.*elsewhere'\).*leave the callback's dirpath out"
    ):
        runs.fit(ModelCheckpoint(dirpath=tmp_path / "elsewhere"), ckpt_path=None)
    assert not (tmp_path / "elsewhere").exists()
    below = ModelCheckpoint(dirpath=f"{runs.dirpath}/own", every_n_train_steps=5)
    runs.fit(below, ckpt_path=None, max_steps=5)
    assert [name for name in runs.durable() if name.startswith("own/")]


def test_where_a_relative_name_goes_is_told_and_a_path_elsewhere_is_an_ordinary_file(runs, tmp_path):
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
