"""TieredModelCheckpoint with failures, with other callbacks, and instead of Lightning's own during a run, and back."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsync
from support.training import Model

from tiered_checkpoint_io import AsyncCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store


def newest(**more):
    return TieredModelCheckpoint(**{"s3_every_n_train_steps": 5, "save_top_k": 1, "save_last": True, **more})


def test_lightnings_async_around_ours_and_foreign_ios_are_refused(runs):
    io = runs.io()
    for plugins, said in (([LightningAsync(io)], "copies the whole state"), ([], "TieredCheckpointIO")):
        with pytest.raises(ConfigError, match=said):
            runs.trainer([newest()], plugins=plugins).fit(Model())
    with pytest.raises(ConfigError, match="TieredCheckpointIO only"):
        AsyncCheckpointIO(LightningAsync(io))


def test_dirpaths_and_steps_that_are_not_allowed(runs, tmp_path):
    for dirpath in (str(tmp_path / "elsewhere"), runs.dirpath + "-2"):
        with pytest.raises(ConfigError, match="not below the IO's"):
            runs.trainer([newest(dirpath=dirpath)]).fit(Model())
    below = newest(dirpath=runs.dirpath + "/below/", save_last=False)
    runs.fit(below, ModelCheckpoint("", "stock", every_n_train_steps=3), TieredModelCheckpoint("", "ours"), max_steps=5)
    assert runs.durable() == ["below/epoch=0-step=5.ckpt", "ours.ckpt", "stock.ckpt"]
    with pytest.raises(ConfigError, match="set one"):
        TieredModelCheckpoint(s3_every_n_train_steps=5, every_n_train_steps=5)
    for value in (0, -1, True, 2.5, "5"):
        with pytest.raises(ConfigError, match="memory_every_n_train_steps"):
            TieredModelCheckpoint(memory_every_n_train_steps=value)
    with pytest.raises(ConfigError, match="bucket"):
        TieredModelCheckpoint(dirpath="s3://")


def test_one_to_resume_from_and_one_for_the_best(runs):
    """Both work together with Lightning's own in a folder of its own, and resume with their state."""

    def three():
        return (
            TieredModelCheckpoint(memory_every_n_train_steps=2, s3_every_n_train_steps=10, save_last=True),
            TieredModelCheckpoint(monitor="score", mode="max", save_top_k=3, filename="best-{step}", every_n_epochs=1),
            ModelCheckpoint(f"{os.path.realpath(runs.dirpath)}/own/", every_n_train_steps=20, save_last=True),
        )

    first = three()
    runs.fit(*first, max_steps=-1, max_epochs=2)
    expected = ["best-step=20.ckpt", "best-step=40.ckpt", "epoch=1-step=40.ckpt", "last.ckpt"]
    assert runs.durable() == sorted([*expected, "own/epoch=1-step=40.ckpt", "own/last.ckpt"])
    assert type(first[2]) is TieredModelCheckpoint
    assert first[2].best_model_path == f"{runs.dirpath}/own/epoch=1-step=40.ckpt"
    second = three()
    trainer, _ = runs.fit(*second, max_steps=-1, max_epochs=3)
    assert trainer.global_step == 60
    assert len(second[1].best_k_models) == 3
    assert "epoch=1-step=40.ckpt" not in runs.durable()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: (tiered(s3_every_n_train_steps=5), tiered(every_n_epochs=1)), "{epoch}-{step}.ckpt"),
        (lambda: (tiered(s3_every_n_train_steps=5), ModelCheckpoint()), "{epoch}-{step}.ckpt"),
        (
            lambda: (tiered(filename="{epoch}-{step}"), tiered(monitor="score", enable_version_counter=False)),
            "{epoch}-{step}.ckpt",
        ),
        (lambda: (tiered(save_last=True), tiered(monitor="score", filename="b", save_last=True)), "last.ckpt"),
    ],
)
def test_two_that_save_to_one_name_are_refused(make, name, runs):
    one, other = make()
    with pytest.raises(ConfigError, match=r"every_n.* and .* both save to .* — ") as caught:
        runs.fit(one, other)
    assert f"both save to {runs.dirpath}/{name} " in str(caught.value)
    assert runs.durable() == []


def tiered(**arguments):
    return TieredModelCheckpoint(**arguments)


BEST = {"monitor": "score", "mode": "max", "save_top_k": 2, "filename": "best-{step}", "every_n_train_steps": 4}
STATE = ("best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path")


def stock(runs, folder, steps, ckpt_path=None, **more):
    """Trains with only Lightning."""
    callback = ModelCheckpoint(folder, **{**BEST, **more})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(callbacks=[callback], max_steps=steps, default_root_dir=runs.root, **quiet)
    trainer.fit(Model(), ckpt_path=ckpt_path)
    return callback


def state(callback):
    return {key: callback.state_dict()[key] for key in STATE}


class Noted:
    """Notes a callback's state as it was right after the restore."""

    def on_train_start(self, *args):
        self.noted = state(self)
        super().on_train_start(*args)


class OursNoted(Noted, TieredModelCheckpoint):
    # The name of the class itself: the state is kept by it.
    __qualname__ = TieredModelCheckpoint.__qualname__


@pytest.mark.parametrize("ckpt_path", ["tiered:latest", "last"])
def test_what_lightning_left_at_dirpath_stays_and_is_named(runs_on_each, ckpt_path, caplog):
    """The same dirpath as before, and nothing in the script says that there is a training to continue."""
    runs = runs_on_each
    every_epoch = {"monitor": "score", "mode": "max", "save_top_k": 1, "save_last": True, "every_n_train_steps": 20}
    stock(runs, runs.root / "old", 40, **every_epoch)
    store = open_store(TieredCheckpointConfig(dirpath=runs.dirpath))
    old = {path.name: path.read_bytes() for path in (runs.root / "old").iterdir()}
    for name, content in old.items():
        store.put(name, content)
    ours = TieredModelCheckpoint(**{**BEST, **every_epoch})
    runs.fit(ours, ckpt_path=ckpt_path)
    assert {name: store.get(name) for name in old} == old
    assert ours.last_model_path == f"{runs.dirpath}/last-v1.ckpt"
    said = [record.getMessage() for record in caplog.records if "without a manifest" in record.getMessage()]
    wanted = "tiered:last" if ckpt_path == "last" else ckpt_path
    text = f"{runs.dirpath} has checkpoints without a manifest, which {wanted} passes by: last.ckpt, best-step=20.ckpt;"
    assert said == [f"{text} to resume from one, give its name, such as ckpt_path='{runs.dirpath}/last.ckpt'"]
    # A second run overwrites its own "last", and nothing else; resumed from the old one, it is the one that counts.
    again = TieredModelCheckpoint(**{**BEST, **every_epoch})
    runs.fit(again, max_steps=40)
    assert again.last_model_path == f"{runs.dirpath}/last-v1.ckpt"
    assert {name: store.get(name) for name in old} == old
    resumed, _ = runs.fit(TieredModelCheckpoint(**{**BEST, **every_epoch}), ckpt_path="last.ckpt", max_steps=60)
    assert resumed.global_step == 60
    store.close()


def test_from_lightnings_own_and_nothing_elsewhere_is_deleted(runs, tmp_path):
    old = stock(runs, tmp_path / "old", 12, save_last=True)
    before = sorted(Path(tmp_path, "old").iterdir())
    ours = OursNoted(**BEST, save_last=True)
    trainer, _ = runs.fit(ours, ckpt_path=old.last_model_path)
    assert ours.noted == state(old)
    assert trainer.global_step == 20
    assert sorted(Path(tmp_path, "old").iterdir()) == before
    assert old.best_model_path == ours.best_model_path
    assert trainer.io.load_checkpoint(ours.best_model_path)["global_step"]
    trainer.io.teardown()
    # Lightning's own callback with our IO becomes one of ours, and keeps the state of the run before.
    adopted = ModelCheckpoint(**BEST)
    runs.wipe()
    runs.fit(adopted, ckpt_path=old.last_model_path, max_steps=13)
    assert type(adopted) is TieredModelCheckpoint
    assert (adopted.best_model_path, adopted.best_k_models) == (old.best_model_path, old.best_k_models)


def test_back_to_lightnings_own(runs):
    ours = TieredModelCheckpoint(**BEST, save_last=True)
    runs.fit(ours, max_steps=12)
    folder = runs.dirpath
    back = stock(runs, folder, 13, ckpt_path=f"{folder}/{Path(ours.best_model_path).name}")
    assert back.best_k_models
    loaded = torch.load(ours.best_model_path, weights_only=False)["callbacks"]
    assert list(loaded) == [back.state_key]
    assert set(back.best_k_models) <= set(map(str, Path(folder).iterdir()))
