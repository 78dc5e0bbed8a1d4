"""What this package relies on in Lightning without a promise, on whichever release is installed."""

import inspect
import sys

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from support.training import Model

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

OVERRIDDEN = {
    "_save_checkpoint": ["self", "trainer", "filepath"],
    "_save_last_checkpoint": ["self", "trainer", "monitor_candidates"],
    "_should_remove_checkpoint": ["self", "trainer", "previous", "current"],
    "_remove_checkpoint": ["self", "trainer", "filepath"],
    "_find_last_checkpoints": ["self", "trainer"],
    "file_exists": ["self", "filepath", "trainer"],
    "to_yaml": ["self", "filepath"],
    "setup": ["self", "trainer", "pl_module", "stage"],
    "on_train_batch_end": ["self", "trainer", "pl_module", "outputs", "batch", "batch_idx"],
}


def test_private_methods_of_model_checkpoint_are_as_known():
    for name, parameters in OVERRIDDEN.items():
        assert list(inspect.signature(getattr(ModelCheckpoint, name)).parameters) == parameters, name
    assert "self._should_skip_saving_checkpoint(trainer)" in inspect.getsource(ModelCheckpoint.on_train_batch_end)
    fresh = ModelCheckpoint()
    assert (fresh._last_global_step_saved, fresh._last_checkpoint_saved, fresh.best_k_models) == (0, "", {})


def test_upstream_calls_what_is_overridden():
    """Each by its name on self, so that the override is what runs."""
    for caller, callee in (
        ("_save_topk_checkpoint", "_save_none_monitor_checkpoint"),
        ("_save_none_monitor_checkpoint", "_save_checkpoint"),
        ("_save_none_monitor_checkpoint", "_should_remove_checkpoint"),
        ("_save_none_monitor_checkpoint", "_remove_checkpoint"),
        ("_update_best_and_save", "_save_checkpoint"),
        ("_update_best_and_save", "_remove_checkpoint"),
        ("_save_last_checkpoint", "_save_checkpoint"),
        ("_get_metric_interpolated_filepath_name", "file_exists"),
        ("on_train_batch_end", "_save_last_checkpoint"),
        ("on_train_epoch_end", "_save_last_checkpoint"),
        ("on_validation_end", "_save_last_checkpoint"),
    ):
        assert f"self.{callee}(" in inspect.getsource(getattr(ModelCheckpoint, caller)), (caller, callee)


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
    """It would by s3fs, which takes a restart a while to import, too."""
    from support.training import Runs

    # Whoever looks for it gets an error.
    monkeypatch.setitem(sys.modules, "s3fs", None)
    runs = Runs(s3_url, memory_dir, tmp_path)
    for ckpt_path in ("tiered:latest", "last", "tiered:latest"):
        callback = TieredModelCheckpoint(s3_every_n_train_steps=3, dirpath=s3_url, save_last=True)
        runs.fit(callback, ckpt_path=ckpt_path, max_steps=6, max_epochs=3)
    trainer = runs.trainer([callback])
    trainer.test(Model(), ckpt_path=callback.best_model_path, verbose=False)


def test_what_a_fit_resumes_from_is_taken_after_the_setup_of_callbacks():
    """By one method, which a callback can replace on the trainer's connector."""
    assert "self.resume_start(" in inspect.getsource(_CheckpointConnector._restore_modules_and_callbacks)
    run = inspect.getsource(Trainer._run)
    assert run.index("_call_setup_hook(") < run.index("_restore_modules_and_callbacks(")
    assert run.index("_call_setup_hook(") < run.index("register_signal_handlers(")
