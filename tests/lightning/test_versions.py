"""Unpromised behaviour of Lightning that this package relies on, on any installed release."""

import sys

import pytest
import torch
from support.training import Model

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint


def test_the_empty_checkpoint_makes_lightning_skip_the_whole_restore(runs):
    loaded = []

    class Watching(Model):
        def on_load_checkpoint(self, checkpoint):
            loaded.append(checkpoint)

    trainer, model = runs.fit(TieredModelCheckpoint(), model=Watching(), max_steps=1)
    assert trainer.io.found_nothing
    assert loaded == []
    fresh = Model()
    optimizer = fresh.configure_optimizers()
    fresh.layer(torch.zeros(1, 8)).sum()
    loss = fresh.layer((torch.arange(8.0) / 10).repeat(2, 1)).pow(2).mean()
    loss.backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


@pytest.mark.matrix
def test_lightning_asks_nothing_of_s3_itself(s3_url, memory_dir, tmp_path, monkeypatch):
    """Lightning would ask by s3fs, whose import takes a while at each restart, too."""
    from support.training import Runs

    # An import of it raises an error.
    monkeypatch.setitem(sys.modules, "s3fs", None)
    runs = Runs(s3_url, memory_dir, tmp_path)
    for ckpt_path in ("tiered:latest", "last", "tiered:latest"):
        callback = TieredModelCheckpoint(s3_every_n_train_steps=3, dirpath=s3_url, save_last=True)
        runs.fit(callback, ckpt_path=ckpt_path, max_steps=6, max_epochs=3)
    trainer = runs.trainer([callback])
    trainer.test(Model(), ckpt_path=callback.best_model_path, verbose=False)
