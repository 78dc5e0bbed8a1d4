"""Saves within an accumulated step, and with averaged weights: a run that resumes ends as if never stopped."""

import os
import signal

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from support.training import Model, Stop

from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted


class Accumulating(Model):
    """Each batch has a gradient of its own; stops as a crash would before a batch."""

    def __init__(self, stop_before=None):
        super().__init__()
        self.stop_before = stop_before

    def training_step(self, batch, index):
        if index == self.stop_before:
            raise Stop
        return self.layer(batch * 0 + torch.arange(8.0) * (index + 1) / 10).pow(2).mean()


class Validating(Model):
    """Gets SIGTERM, or fails, during the validation that follows a step."""

    def __init__(self, told_after=None, fails_after=None, hook="validation_step"):
        super().__init__()
        self.told_after = told_after
        self.fails_after = (hook, fails_after)

    def validation_step(self, _, index):
        if (self.global_step, index) == (self.told_after, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        self.may_fail("validation_step")

    def on_validation_start(self):
        self.may_fail("on_validation_start")

    def on_validation_end(self):
        self.may_fail("on_validation_end")

    def may_fail(self, hook):
        if self.fails_after == (hook, self.global_step):
            raise Stop

    val_dataloader = Model.train_dataloader


def undisturbed(runs, model, *others, **options):
    """Returns the weights at the end of a training without checkpoints."""
    _, model = runs.fit(*others, model=model, ckpt_path=None, plugins=[], enable_checkpointing=False, **options)
    return model.layer.weight


@pytest.mark.skipif(lightning.__version__.startswith("2.4"), reason="it trains some batches of a begun epoch twice")
@pytest.mark.parametrize(
    "options",
    [
        {"memory_every_n_train_steps": 2, "save_top_k": 0},
        pytest.param({"s3_every_n_train_steps": 2}, marks=pytest.mark.matrix),
    ],
)
def test_a_step_is_not_saved_again_without_the_gradients_of_the_batches_since(options, runs):
    """Killed twice, the second time in the middle of the step that the first resume has begun."""
    training = {"max_steps": 5, "accumulate_grad_batches": 4}
    expected = undisturbed(runs, Accumulating(), **training)
    for stop_before in (9, 10, None):
        callback = TieredModelCheckpoint(**options)
        trainer, model = runs.fit(callback, model=Accumulating(stop_before), **training)
    assert trainer.io.checkpointer.restored.step == 2
    assert model.layer.weight.equal(expected)


def preempted(runs, **training):
    with pytest.raises(Preempted):
        runs.fit(average(), PreemptionCheckpoint(), model=Validating(told_after=5), **training)


def ended(runs, **training):
    """Trains to the end, at which WeightAveraging replaces the weights by averages."""
    memory_alone = TieredModelCheckpoint(memory_every_n_train_steps=5, save_top_k=0)
    runs.fit(average(), memory_alone, model=Validating(), **training, max_steps=10)


def failed(hook):
    def failed(runs, **training):
        saving = TieredModelCheckpoint(save_on_exception=True, save_top_k=0)
        runs.fit(average(), saving, model=Validating(fails_after=10, hook=hook), **training)

    return failed


def average():
    return callbacks.EMAWeightAveraging(decay=0.9)


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="came with Lightning 2.6")
@pytest.mark.parametrize(
    ("stops", "name", "step"),
    [
        (ended, "end_of_training.ckpt", 10),
        (preempted, "preempted.ckpt", 5),
        (failed("validation_step"), None, 10),
        pytest.param(failed("on_validation_start"), None, 10, marks=pytest.mark.matrix),
        pytest.param(failed("on_validation_end"), None, 10, marks=pytest.mark.matrix),
    ],
)
def test_what_is_saved_beside_averaged_weights_has_those_that_are_trained(stops, name, step, runs):
    """At the end of training, and during a validation of the averages: by a last checkpoint, and by an exception."""
    training = {"val_check_interval": 5, "num_sanity_val_steps": 0}
    expected = undisturbed(runs, Validating(), average(), **training)
    stops(runs, **training)
    trainer, model = runs.fit(average(), TieredModelCheckpoint(save_top_k=0), model=Validating(), **training)
    restored = trainer.io.checkpointer.restored
    assert (name or restored.name, restored.step) == (restored.name, step)
    assert model.layer.weight.equal(expected)
