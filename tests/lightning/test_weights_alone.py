"""Weights alone, of a real Trainer: what training resumes from stays beside them, and nobody takes them for that."""

from pathlib import Path

import pytest
from support.training import Model

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import CheckpointNotFoundError


@pytest.mark.parametrize("asked", ["best", Path("tiered:latest")], ids=str)
def test_nothing_is_evaluated_where_there_is_no_checkpoint(runs, asked):
    # Weights alone are nothing to resume from; without a monitor, the newest of the others is the best.
    runs.fit(TieredModelCheckpoint(save_weights_only=True), ckpt_path=None)
    trainer = runs.trainer([TieredModelCheckpoint(save_weights_only=True)])
    for _ in range(2):
        with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint to resume from"):
            trainer.test(Model(), ckpt_path=asked, verbose=False)


def test_weights_alone_do_not_push_what_to_resume_from_out_of_memory(runs):
    # Three of weights alone are saved at step 10, and memory keeps two checkpoints.
    watched = [("score", "min"), ("score", "max"), ("step", "max")]
    best = [
        TieredModelCheckpoint(
            s3_every_n_train_steps=10, save_weights_only=True, monitor=monitor, mode=mode, filename=f"{monitor}-{mode}"
        )
        for monitor, mode in watched
    ]
    runs.fit(TieredModelCheckpoint(memory_every_n_train_steps=4, save_top_k=0), *best, stop_at=11)
    assert runs.io().load_checkpoint("tiered:latest")["global_step"] == 8


def test_a_step_of_weights_alone_is_saved_to_memory_as_well(runs):
    both = TieredModelCheckpoint(memory_every_n_train_steps=5, s3_every_n_train_steps=5, save_weights_only=True)
    runs.fit(both, stop_at=11)
    assert runs.io().load_checkpoint("tiered:latest")["global_step"] == 10


def test_weights_alone_are_said_to_be_nothing_to_resume_from(runs, caplog):
    caplog.set_level("INFO", logger="tiered_checkpoint_io")
    weights, resume = (
        TieredModelCheckpoint(save_weights_only=True),
        'to resume: trainer.fit(..., ckpt_path="tiered:latest")',
    )
    runs.fit(weights, ckpt_path=None, max_steps=5)
    said = [record.getMessage() for record in caplog.records]
    assert said[-1] == "these are weights alone, which training can't resume from"
    assert resume not in said
    caplog.clear()
    runs.fit(TieredModelCheckpoint(memory_every_n_train_steps=5, every_n_train_steps=10))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{runs.dirpath} has weights alone, which training can't resume from: epoch=0-step=5.ckpt" in warned
    assert [record.getMessage() for record in caplog.records][-1] == resume


def test_what_a_trainer_saves_that_has_not_trained_is_nothing_to_resume_from(runs):
    """It holds the weights that it has tested, step 0, and no optimizers."""
    runs.fit(TieredModelCheckpoint(s3_every_n_train_steps=10), max_steps=10)
    trainer = runs.trainer([TieredModelCheckpoint()])
    trainer.test(model := Model(), ckpt_path="tiered:latest", verbose=False)
    trainer.save_checkpoint("tested.ckpt")
    trainer.io.teardown()
    assert "tested.ckpt" in runs.durable()
    resumed, _ = runs.fit(TieredModelCheckpoint(s3_every_n_train_steps=10))
    assert resumed.io.checkpointer.restored.name == "epoch=0-step=10.ckpt"
    tested = runs.io().load_checkpoint("tested.ckpt")["state_dict"]["layer.weight"]
    assert tested.equal(model.layer.weight)
