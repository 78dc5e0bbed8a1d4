"""Notice to end at other moments than within training, and on other threads; Slurm's requeue after it."""

import os
import signal
import threading

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import Told

from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted
from tiered_checkpoint_io.errors import SaveError


class NoticeAt(Callback):
    """Gets the notice to end in a hook of a fit; notes the hooks that are called after it."""

    def __init__(self, hook, tell=lambda: os.kill(os.getpid(), signal.SIGTERM)):
        self.after = []
        setattr(self, hook, lambda *_: tell())

    def teardown(self, trainer, *_, **__):
        self.trainer = trainer
        self.after.append("teardown")

    def on_exception(self, *_):
        self.after.append("on_exception")


@pytest.mark.parametrize("hook", ["on_train_end", pytest.param("on_fit_end", marks=pytest.mark.matrix)])
def test_notice_after_the_last_batch_ends_the_script_once_all_of_the_fit_is_done(runs, hook, caplog):
    noted, io = NoticeAt(hook), runs.io()
    callbacks = [PreemptionCheckpoint(), TieredModelCheckpoint(memory_every_n_train_steps=5), noted]
    with pytest.raises(Preempted) as end:
        runs.fit(*callbacks, io=io, ckpt_path=None)
    assert end.value.code == 128 + signal.SIGTERM
    assert noted.after == ["teardown"], "what it saved on an exception, this rank would save alone"
    assert noted in noted.trainer.callbacks
    assert "received SIGTERM after the last batch; the script ends here" in caplog.messages
    assert runs.durable() == ["epoch=0-step=20.ckpt"]
    # A script that catches this, and trains again, has an ordinary fit.
    assert io.checkpointer.session._in_time(5) == 5
    trainer, _ = runs.fit(*callbacks[:2], io=io, max_steps=30)
    assert trainer.global_step == 30


def test_training_on_another_thread_gets_its_notice_by_a_call(runs, caplog):
    preemption, ends = PreemptionCheckpoint(), []

    def tell():
        with pytest.raises(ValueError, match="999"):
            preemption.notify(999)
        assert preemption.notice.leave_by is None, "what waits for the durable tier waits on"
        preemption.notify(signal.SIGUSR1)

    noted = NoticeAt("on_train_batch_end", tell)
    callbacks = [TieredModelCheckpoint(memory_every_n_train_steps=50), preemption, noted]
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
    warnings = [line for line in caplog.messages if "call PreemptionCheckpoint.notify()" in line]
    assert len(warnings) == 1


@pytest.mark.parametrize("fails", ["upload", "hook"])
def test_the_exit_status_of_a_preemption_stays_where_saves_fail_and_failures_are_raised(runs, caplog, fails):
    if fails == "upload":
        (runs.root / "durable").write_bytes(b"in the way")
    io = runs.io(on_save_error="raise", preflight="off")
    saved = {"s3_every_n_train_steps": 4, "save_top_k": -1} if fails == "upload" else {"save_top_k": 0}
    with pytest.raises(Preempted) as ended:
        runs.fit(
            TieredModelCheckpoint(**saved),
            PreemptionCheckpoint(grace_seconds=60),
            io=io,
            model=Told(6, fails=fails == "hook"),
        )
    assert ended.value.code == 143
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("a hook of the user's" in error if fails == "hook" else "durable" in error for error in errors)
    # The fit after it gets the failures.
    with pytest.raises((SaveError, RuntimeError)):
        runs.fit(TieredModelCheckpoint(s3_every_n_train_steps=4), io=io, model=Told(99, fails=fails == "hook"))


@pytest.mark.parametrize("first", [True, False], ids=["listed first", "listed last"])
def test_the_last_checkpoint_is_made_when_all_other_callbacks_are_done_with_the_batch(runs, first):
    """Yet the callback is no checkpoint callback of Lightning's: a search for these finds the same as without it."""

    class Averaging(Callback):
        batches = 0

        def on_train_batch_end(self, *_):
            self.batches += 1

        def state_dict(self):
            return {"batches": self.batches}

    last, averaging = PreemptionCheckpoint(grace_seconds=60), Averaging()
    trainer = runs.trainer([last, averaging] if first else [averaging, last])
    with pytest.raises(Preempted):
        trainer.fit(Told(6))
    saved = runs.io().load_checkpoint("preempted.ckpt")
    assert saved["callbacks"][averaging.state_key] == {"batches": saved["global_step"]}
    assert trainer.callbacks[-1] is last
    assert trainer.checkpoint_callbacks == [trainer.checkpoint_callback]
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    assert runs.trainer([PreemptionCheckpoint()], enable_checkpointing=False).checkpoint_callback is None


@pytest.mark.parametrize("fails", [False, True])
def test_slurm_is_asked_to_requeue_the_job(runs, tmp_path, monkeypatch, fails):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    facts = "JOB_ID=80 ARRAY_JOB_ID=77 ARRAY_TASK_ID=3 JOB_NAME=train NTASKS=1 PROCID=0 LOCALID=0 NODEID=0"
    for fact in facts.split():
        monkeypatch.setenv(*f"SLURM_{fact}".split("="))
    with pytest.raises(Preempted) as ended:
        runs.fit(PreemptionCheckpoint(), model=Told(6, signal.SIGUSR1, fails=fails), ckpt_path=None, plugins=None)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert (tmp_path / "asked").read_text() == "requeue 77_3\n"
    assert runs.durable() == ([] if fails else ["preempted.ckpt"])
