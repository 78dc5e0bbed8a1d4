"""Trainings as launchers and schedulers run them: told to end, on another thread, queued again."""

import os
import signal

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import Model

from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted
from tiered_checkpoint_io.errors import CheckpointNotFoundError

BOUND_S = 60.0


class Told(Model):
    """Tells its own process to end at a step."""

    def __init__(self, at, number=signal.SIGTERM, fails=False):
        super().__init__()
        self.at, self.number, self.fails = at, number, fails

    def on_train_batch_start(self, *_):
        if self.global_step == self.at - 1:
            os.kill(os.getpid(), self.number)

    def on_save_checkpoint(self, _):
        if self.fails:
            raise RuntimeError("a hook of the user's")


@pytest.mark.parametrize("fails", ["upload", "hook"])
def test_the_exit_status_of_a_preemption_stays_where_saves_fail_and_failures_are_raised(runs, caplog, fails):
    if fails == "upload":
        (runs.root / "durable").write_bytes(b"in the way")
    io = runs.io(on_save_error="raise", preflight="off")
    saved = {"s3_every_n_train_steps": 4, "save_top_k": -1} if fails == "upload" else {"save_top_k": 0}
    with pytest.raises(Preempted) as ended:
        runs.fit(
            TieredModelCheckpoint(**saved),
            PreemptionCheckpoint(grace_seconds=BOUND_S),
            io=io,
            model=Told(6, fails=fails == "hook"),
        )
    assert ended.value.code == 143
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("a hook of the user's" in error if fails == "hook" else "durable" in error for error in errors)


@pytest.mark.parametrize("strict", [True, False])
def test_fabric_fills_a_state_or_says_that_there_is_no_checkpoint(runs, strict):
    """What is not filled must not pass for restored; who asks for all of it gets something falsy."""
    io = runs.io()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = fabric.setup(torch.nn.Linear(2, 2))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": 0}
    for target in (state, model):
        with pytest.raises(CheckpointNotFoundError, match=f"there is no checkpoint at {io.config.dirpath} yet"):
            fabric.load("tiered:latest", target, strict=strict)
    assert not fabric.load("tiered:latest")
    fabric.save(f"{io.config.dirpath}/step-5.ckpt", {**state, "step": 5})
    fabric.load("tiered:latest", state, strict=strict)
    assert state["step"] == 5
    io.teardown()


@pytest.mark.parametrize("first", [True, False], ids=["listed first", "listed last"])
def test_the_last_checkpoint_is_made_when_all_other_callbacks_are_done_with_the_batch(runs, first):
    """It is no checkpoint callback of Lightning's all the same: what looks for these finds what it would without it."""

    class Averaging(Callback):
        batches = 0

        def on_train_batch_end(self, *_):
            self.batches += 1

        def state_dict(self):
            return {"batches": self.batches}

    last, averaging = PreemptionCheckpoint(grace_seconds=BOUND_S), Averaging()
    trainer = runs.trainer([last, averaging] if first else [averaging, last])
    with pytest.raises(Preempted):
        trainer.fit(Told(6))
    saved = runs.io().load_alone("preempted.ckpt")
    assert saved["callbacks"][averaging.state_key] == {"batches": saved["global_step"]}
    assert trainer.callbacks[-1] is last
    assert trainer.checkpoint_callbacks == [trainer.checkpoint_callback]
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    assert runs.trainer([PreemptionCheckpoint()], enable_checkpointing=False).checkpoint_callback is None


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job of Slurm with one task; what is called in place of ``scontrol`` notes how."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    facts = {
        "JOB_ID": "80",
        "ARRAY_JOB_ID": "77",
        "ARRAY_TASK_ID": "3",
        "JOB_NAME": "train",
        "NTASKS": "1",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
    }
    for key, value in facts.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    return tmp_path / "asked"


@pytest.mark.parametrize(
    "saves",
    ["as ever", "fails", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("elsewhere", "to dirpath"))],
)
def test_slurms_requeue_resumes_without_a_callback_of_ours(runs, slurm, tmp_path, saves):
    """The checkpoint goes to the tiers, the requeue is asked for, and a fit without ``ckpt_path`` resumes from it."""
    root = {"elsewhere": "memory://logs", "to dirpath": runs.dirpath}.get(saves, runs.root)
    options = {"ckpt_path": None, "plugins": None, "default_root_dir": root}
    with pytest.raises(Preempted) as ended:
        runs.fit(model=Told(6, signal.SIGUSR1, fails=saves == "fails"), **options)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert slurm.read_text() == "requeue 77_3\n"
    assert not [*tmp_path.glob("hpc_ckpt*")]
    trainer, _ = runs.fit(**options)
    restored = trainer.io.checkpointer.restored
    if saves == "fails":
        assert restored is None
    else:
        assert (restored.name, restored.step, trainer.global_step) == ("hpc_ckpt_1.ckpt", 6, 20)
        # From then on, what is newer counts.
        again, _ = runs.fit(max_steps=21, **options)
        assert again.io.checkpointer.restored.step == 20
