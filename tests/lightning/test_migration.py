"""A run changes over from Lightning's ModelCheckpoint to ours, and back: the state comes along."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import Model

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

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


def test_a_later_step_that_lightning_saved_beside_ours_is_named(runs_on_each, caplog):
    """A run without our IO saved in the same folder in between."""
    runs = runs_on_each
    runs.fit(TieredModelCheckpoint(every_n_train_steps=10, filename="{step}"), max_steps=10, ckpt_path=None)
    stock(runs, runs.root / "old", 40, every_n_train_steps=20, save_top_k=-1, filename="{step}")
    store = open_store(TieredCheckpointConfig(dirpath=runs.dirpath))
    for path in (runs.root / "old").iterdir():
        store.put(path.name, path.read_bytes())
    store.close()
    resumed, _ = runs.fit(TieredModelCheckpoint(every_n_train_steps=10, filename="again-{step}"), max_steps=20)
    assert resumed.global_step == 20
    (said,) = [record.getMessage() for record in caplog.records if "passes by" in record.getMessage()]
    assert said.startswith("tiered:latest took step=10.ckpt (step 10), and passes by step=40.ckpt (step 40), which has")
    assert said.endswith(f"give its name: ckpt_path='{runs.dirpath}/step=40.ckpt'")


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
    # With other triggers than before, the best of this monitor still count.
    other = OursNoted(**{**BEST, "every_n_train_steps": 5, "filename": "five-{step}"})
    runs.wipe()
    runs.fit(other, ckpt_path=old.last_model_path, max_steps=13)
    assert other.noted == state(old)
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
