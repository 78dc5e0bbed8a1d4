"""What a user does with Lightning's Trainer and the checkpoint IO alone, as the card's own example has it."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import Runs


@pytest.fixture
def runs(tmp_path, memory_dir, monkeypatch):
    # Where Lightning's default callback would write to.
    monkeypatch.chdir(tmp_path)
    return Runs(str(tmp_path / "durable"), memory_dir, tmp_path)


@pytest.mark.xfail(strict=True, reason="Lightning's default ModelCheckpoint saves outside dirpath: InvalidNameError")
def test_the_io_alone_saves_each_epoch_and_resumes(runs):
    options = {"max_steps": -1, "enable_checkpointing": True, "asynchronous": False}
    runs.fit(io=runs.io(on_save_error="raise"), ckpt_path=None, max_epochs=2, **options)
    assert runs.durable() == ["epoch=1-step=40.ckpt"]
    resumed, _ = runs.fit(max_epochs=3, **options)
    assert resumed.io.checkpointer.restored.step == 40
    assert resumed.global_step == 60


@pytest.mark.xfail(strict=True, reason="a weights-only save counts as the newest: KeyError 'optimizer_states'")
def test_a_weights_only_save_is_not_resumed_from_and_loads_by_its_name(runs):
    callback = ModelCheckpoint(dirpath=runs.dirpath, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    _, model = runs.fit(callback, ckpt_path=None, max_steps=5)
    export = runs.trainer([], io=runs.io(on_save_error="raise"), max_steps=5, enable_checkpointing=False)
    export.fit(model)
    export.save_checkpoint(f"{runs.dirpath}/weights.ckpt", weights_only=True)
    export.io.teardown()

    for lost in (False, True):
        if lost:
            runs.wipe()
        io = runs.io()
        state = io.load_checkpoint("weights.ckpt")
        assert set(state["state_dict"]) == set(model.state_dict())
        io.teardown()
        resumed, _ = runs.fit(ModelCheckpoint(dirpath=runs.dirpath, every_n_train_steps=5), max_steps=7 + lost)
        assert resumed.io.checkpointer.restored.name == "step=5.ckpt"
        assert resumed.global_step == 7 + lost
