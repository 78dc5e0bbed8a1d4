"""Training stories with a real Trainer: killed, resumed, pruned, during accumulated steps; both tiers, both IOs."""

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from support.clocks import quick
from support.training import LogBook, Model, Stop, Told

from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted
from tiered_checkpoint_io.errors import CheckpointNotFoundError, SaveError
from tiered_checkpoint_io.stores.directory import DirectoryStore


def every(**more):
    return TieredModelCheckpoint(
        **{"memory_every_n_train_steps": 2, "s3_every_n_train_steps": 5, "save_top_k": -1, **more}
    )


def test_stopped_resumed_from_memory_then_from_the_durable_tier_is_as_never_stopped(runs_on_each):
    runs = runs_on_each
    _, whole = runs.fit(every(), ckpt_path=None)
    runs.wipe()
    before = runs.durable()
    assert before == sorted(f"epoch=0-step={step}.ckpt" for step in (5, 10, 15, 20))

    runs.fit(every(dirpath=None), stop_at=13, ckpt_path=None)
    resumed, _ = runs.fit(every(), stop_at=17)
    assert resumed.io.checkpointer.restored.step == 12
    assert resumed.io.checkpointer.restored.tier == "memory"
    runs.wipe()
    last, model = runs.fit(every())
    assert last.io.checkpointer.restored.tier == "durable"
    assert last.io.checkpointer.restored.step == 15
    assert last.global_step == 20
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))


def test_last_and_latest_without_any_start_from_scratch_but_are_no_test(runs):
    for sentinel, named in (("last", " that is named last"), ("tiered:latest", "")):
        trainer, _ = runs.fit(every(memory_every_n_train_steps=None), ckpt_path=sentinel, max_steps=3)
        assert trainer.global_step == 3
        trainer = runs.trainer([every()])
        with pytest.raises(CheckpointNotFoundError, match=f"no checkpoint{named} to resume from at"):
            trainer.test(Model(), ckpt_path=sentinel, verbose=False)


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_loggers_hear_of_checkpoints_only_once_they_are_durable(runs, asynchronous):
    book = LogBook(runs.dirpath)
    callback = TieredModelCheckpoint(
        memory_every_n_train_steps=2, s3_every_n_train_steps=10, save_top_k=1, save_last=True
    )
    runs.fit(callback, logger=book, asynchronous=asynchronous)
    assert book.states
    for best, last, names in book.states:
        assert {Path(path).name for path in (best, last) if path} <= set(names)
    assert book.states[-1][0] == f"{runs.dirpath}/epoch=0-step=20.ckpt"
    seen = {key for _, metrics in book.metrics for key in metrics if key.startswith("checkpoint/")}
    saves = "stall_s capture_s durable_step size_GiB staged_GiB_per_s pending saved_total failed_total"
    assert seen - {"checkpoint/drain_s"} == {f"checkpoint/{key}" for key in saves.split()}
    # If a save waits for the commit, its stall includes this time.
    assert ("checkpoint/drain_s" in seen) == asynchronous
    assert [step for step, metrics in book.metrics if "checkpoint/stall_s" in metrics] == [*range(2, 21, 2)]


@pytest.mark.parametrize("on_save_error", ["warn", "raise"])
def test_a_background_failure_is_reported_during_training(on_save_error, runs):
    """However often the callback looks what became of saves."""
    Path(runs.dirpath).write_bytes(b"in the way")
    io = runs.io(on_save_error=on_save_error, drain="thread", preflight="off")
    io.checkpointer.session.clock = quick(outcome_poll_s=0.0)
    counted = []

    class Waits(Callback):
        def on_train_batch_end(self, trainer, *_):
            session = io.checkpointer.session
            if trainer.global_step == 7:
                # No step to save at, but one to look at.
                for _ in range(200):
                    time.sleep(0 if session.open().drain.progress().last_error else 0.05)
            if trainer.global_step == 9:
                counted.append(session.counts["failed"])

    fit = functools.partial(runs.fit, Waits(), every(), io=io, ckpt_path=None)
    if on_save_error == "raise":
        with pytest.raises(SaveError, match="did not reach the durable tier: .*Not a directory"):
            fit()
        assert counted == [], "it ended with the next save"
    else:
        with contextlib.suppress(SaveError):
            fit()
        assert counted == [1]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.matrix), signal.SIGTERM])
def test_a_second_signal_ends_the_wait_for_an_upload(runs, monkeypatch, caplog, number):
    """Lightning ignores it from the first one on, and a large upload takes minutes."""
    free, name = threading.Event(), {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "a further SIGTERM"}[number]

    class Again(logging.Handler):
        def emit(self, record):
            if f"waiting for the upload of the checkpoint, 60 s at most; {name} ends the wait" in record.getMessage():
                os.kill(os.getpid(), number)

    def held(store, key, *args, _upload=DirectoryStore._upload, **options):
        assert "step" not in key or free.wait(60)
        return _upload(store, key, *args, **options)

    monkeypatch.setattr(DirectoryStore, "_upload", held)
    caplog.set_level("INFO", "tiered_checkpoint_io")
    monkeypatch.setattr(logging.getLogger("tiered_checkpoint_io"), "handlers", [Again()])
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit):
            runs.fit(every(), io=runs.io(preflight="off"), ckpt_path=None, model=Told(6, number))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        free.set()
    assert caplog.messages[-1].startswith("1 queued checkpoint was not uploaded (epoch=0-step=5.ckpt): ")
    assert "it stays in node memory; retry with: tiered-ckpt flush --namespace" in caplog.messages[-1]


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
