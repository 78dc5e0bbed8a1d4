"""When and where notice that a job is to end may come, beside the signal amid training."""

import os
import signal
import threading

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import _TunerExitException
from support.training import Model, Stop

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.notice import is_unhandled
from tiered_checkpoint_io.callbacks.preemption import Preempted


class ToldAt(Callback):
    """Is told to end in a hook of a fit; notes which of the others are called after it."""

    def __init__(self, hook, tell=lambda: os.kill(os.getpid(), signal.SIGTERM)):
        self.after = []
        setattr(self, hook, lambda *_: tell())

    def teardown(self, trainer, *_, **__):
        self.trainer = trainer
        self.after.append("teardown")

    def on_exception(self, *_):
        self.after.append("on_exception")


def said(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("hook", ["on_train_end", pytest.param("on_fit_end", marks=pytest.mark.matrix)])
def test_notice_after_the_last_batch_ends_the_script_once_all_of_the_fit_is_done(runs, hook, caplog):
    told, io = ToldAt(hook), runs.io()
    callbacks = [PreemptionCheckpoint(requeue=False), TieredModelCheckpoint(memory_every_n_train_steps=5), told]
    with pytest.raises(Preempted) as end:
        runs.fit(*callbacks, io=io, ckpt_path=None)
    assert end.value.code == 128 + signal.SIGTERM
    assert told.after == ["teardown"], "what it saved on an exception, this rank would save alone"
    assert told in told.trainer.callbacks
    assert "received SIGTERM after the last batch; the script ends here" in said(caplog)
    assert runs.durable() == ["epoch=0-step=20.ckpt"]
    # What catches that, and trains on, has a fit as any.
    assert io.checkpointer.session._in_time(5) == 5
    trainer, _ = runs.fit(*callbacks[:2], io=io, max_steps=30)
    assert trainer.global_step == 30


def test_notice_where_a_time_limit_ends_training_amid_a_batch_comes_once_uploads_are_waited_for(runs, monkeypatch):
    """As NeMo's does: Lightning then calls teardown in a handler of that exception, and ends the rest after it."""

    def leave():
        if model.global_step == 5:
            signal.raise_signal(signal.SIGTERM)
            raise _TunerExitException

    model = Model()
    torn_down, teardown = [], TieredCheckpointIO.teardown
    monkeypatch.setattr(TieredCheckpointIO, "teardown", lambda io: teardown(io) or torn_down.append(runs.durable()))
    with pytest.raises(Preempted):
        runs.fit(
            TieredModelCheckpoint(memory_every_n_train_steps=1, save_top_k=0),
            ToldAt("on_train_batch_end", leave),
            PreemptionCheckpoint(requeue=False),
            model=model,
            ckpt_path=None,
        )
    assert torn_down == [["end_of_training.ckpt"]]
    assert is_unhandled(signal.SIGTERM)


def test_notice_before_training_fails_is_said(runs, caplog):
    class Fails(Model):
        def training_step(self, *_):
            signal.raise_signal(signal.SIGTERM)
            raise Stop

    runs.fit(PreemptionCheckpoint(), TieredModelCheckpoint(), model=Fails(), ckpt_path=None)
    assert "received SIGTERM, but fit failed before it could make a last checkpoint" in said(caplog)


def test_training_on_another_thread_is_told_by_a_call(runs, caplog):
    preemption, ends = PreemptionCheckpoint(requeue=False), []

    def tell():
        with pytest.raises(ValueError, match="999"):
            preemption.notify(999)
        assert preemption.notice.leave_by is None, "what waits for the durable tier waits on"
        preemption.notify(signal.SIGUSR1)

    told = ToldAt("on_train_batch_end", tell)
    callbacks = [TieredModelCheckpoint(memory_every_n_train_steps=50), preemption, told]
    assert not preemption.notify(), "nothing trains"

    def train():
        with pytest.raises(Preempted) as end:
            runs.fit(*callbacks, ckpt_path=None)
        ends.append(end.value.code)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ends == [128 + signal.SIGUSR1]
    assert runs.durable() == ["preempted.ckpt"]
    warnings = [line for line in said(caplog) if "call PreemptionCheckpoint.notify()" in line]
    assert len(warnings) == 1


@pytest.mark.parametrize(("grace", "warns"), [(30, False), (31, True)])
def test_a_grace_time_that_torchrun_cuts_short_is_said(runs, monkeypatch, caplog, grace, warns):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    runs.fit(PreemptionCheckpoint(grace_seconds=grace), TieredModelCheckpoint(), max_steps=1, ckpt_path=None)
    assert ("a longer --shutdown-timeout" in caplog.text) == warns
