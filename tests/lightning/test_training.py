"""Training stories with a real Trainer: killed, resumed, pruned; both tiers, both IOs."""

import ast
import os
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsync
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint, tiers_for_step
from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.errors import ConfigError, UsageError
from tiered_checkpoint_io.ids import MANIFEST_PREFIX, name_from_manifest_key
from tiered_checkpoint_io.storage import open_store


class Stop(Exception):
    pass


class Model(LightningModule):
    def __init__(self, stop_at=0, ballast=0):
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("ballast", torch.zeros(ballast))
        self.layer = torch.nn.Linear(8, 4)
        self.stop_at = stop_at

    def training_step(self, batch, _):
        # What a step sees depends on the step alone: Lightning does not wind a plain loader forward.
        batch = batch * 0 + torch.arange(8.0) * (self.global_step % 5 + 1) / 10
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        self.log("score", torch.tensor(float((self.global_step * 7) % 10)))
        return loss

    def on_train_batch_end(self, *_):
        if self.stop_at and self.global_step == self.stop_at:
            raise Stop

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        data = torch.arange(40 * 8, dtype=torch.float32).view(40, 8) / 100
        return DataLoader(data, batch_size=2)


class LogBook(Logger):
    name = "book"
    version = "0"

    def __init__(self):
        super().__init__()
        self.metrics = []
        self.saved = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def after_save_checkpoint(self, callback):
        self.saved.append(callback.best_model_path)


@pytest.fixture(params=["directory", "s3"])
def dirpath(request, tmp_path):
    return request.getfixturevalue("s3_url") if request.param == "s3" else str(tmp_path / "durable")


@pytest.fixture
def fit(dirpath, memory_dir, tmp_path):
    def fit(
        *, callback, stop_at=0, asynchronous=True, ckpt_path="tiered:latest", steps=20, model=None, logger=False, **more
    ):
        io = TieredCheckpointIO(dirpath=dirpath, memory_dir=memory_dir, wait_timeout_s=60)
        trainer = Trainer(
            plugins=[AsyncCheckpointIO(io) if asynchronous else io],
            callbacks=[callback, *more.pop("callbacks", [])],
            max_steps=steps,
            logger=logger,
            accelerator="cpu",
            enable_progress_bar=more.pop("enable_progress_bar", False),
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **more,
        )
        model = model or Model(stop_at)
        trainer.io = io
        try:
            trainer.fit(model, ckpt_path=ckpt_path)
        except Stop:
            io.teardown()
        return trainer, model

    return fit


def durable(dirpath):
    store = open_store(TieredCheckpointConfig(dirpath=dirpath))
    try:
        return sorted(name_from_manifest_key(entry.key) for entry in store.list(MANIFEST_PREFIX))
    finally:
        store.close()


def wipe(memory_dir):
    for file in Path(memory_dir).rglob("saves/*/*/*"):
        file.unlink()
    for folder in Path(memory_dir).rglob("saves/*/rank-*"):
        folder.rmdir()


def steps_callback(**more):
    return TieredModelCheckpoint(
        **{"memory_every_n_train_steps": 2, "s3_every_n_train_steps": 5, "save_top_k": -1, **more}
    )


def test_stopped_resumed_from_memory_then_from_the_durable_tier_is_as_never_stopped(fit, memory_dir, dirpath):
    _, whole = fit(callback=steps_callback(), ckpt_path=None)
    wipe(memory_dir)
    before = durable(dirpath)
    assert [name for name in before if name.startswith("memory/")] == []
    assert before == sorted(f"epoch=0-step={step}.ckpt" for step in (5, 10, 15, 20))

    fit(callback=steps_callback(dirpath=None), stop_at=13, ckpt_path=None)
    resumed, _ = fit(callback=steps_callback(), stop_at=17)
    assert resumed.io.checkpointer.restored.step == 12
    assert resumed.io.checkpointer.restored.tier == "memory"
    wipe(memory_dir)
    last, model = fit(callback=steps_callback())
    assert last.io.checkpointer.restored.tier == "durable"
    assert last.io.checkpointer.restored.step == 15
    assert last.global_step == 20
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))


def test_top_k_is_kept_over_a_resume_and_what_it_resumed_from_stays(fit, dirpath):
    def callback():
        return TieredModelCheckpoint(
            memory_every_n_train_steps=1,
            s3_every_n_train_steps=2,
            monitor="score",
            mode="max",
            save_top_k=2,
            save_last=True,
        )

    first = callback()
    fit(callback=first, stop_at=11)
    assert len(first.best_k_models) == 2
    second = callback()
    trainer, _ = fit(callback=second)
    resumed_from = trainer.io.checkpointer.restored.name
    assert len(second.best_k_models) == 2
    names = set(durable(dirpath))
    kept = {path.removeprefix(dirpath + "/") for path in second.best_k_models}
    assert names - {resumed_from} == kept | {"last.ckpt"}
    assert Path(second.best_model_path).name in {Path(path).name for path in second.best_k_models}
    scores = {path: float(score) for path, score in second.best_k_models.items()}
    assert scores[second.best_model_path] == max(scores.values())
    assert trainer.io.load_checkpoint(second.best_model_path)["global_step"]
    trainer.io.teardown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_save_last_uploads_nothing_and_last_resumes(fit, dirpath, memory_dir, asynchronous):
    callback = TieredModelCheckpoint(s3_every_n_train_steps=5, save_top_k=1, save_last=True)
    trainer, _ = fit(callback=callback, asynchronous=asynchronous)
    assert durable(dirpath) == ["epoch=0-step=20.ckpt", "last.ckpt"]
    assert callback.last_model_path == f"{dirpath}/last.ckpt"
    assert trainer.io.load_checkpoint(callback.last_model_path)["global_step"] == 20
    trainer.io.teardown()
    wipe(memory_dir)
    again = TieredModelCheckpoint(s3_every_n_train_steps=5, save_top_k=1, save_last=True)
    resumed, _ = fit(callback=again, ckpt_path="last", steps=25, max_epochs=9)
    assert resumed.io.checkpointer.restored.step == 20
    assert resumed.global_step == 25


def test_last_without_any_starts_from_scratch(fit):
    trainer, _ = fit(callback=steps_callback(), ckpt_path="last", steps=3)
    assert trainer.global_step == 3


def test_epochs_time_and_exceptions_trigger_durable_saves(fit, dirpath):
    fit(callback=TieredModelCheckpoint(every_n_epochs=1, save_top_k=-1), steps=-1, max_epochs=2, ckpt_path=None)
    assert durable(dirpath) == ["epoch=0-step=20.ckpt", "epoch=1-step=40.ckpt"]
    timed = TieredModelCheckpoint(train_time_interval=timedelta(microseconds=1), filename="timed-{step}", save_top_k=1)
    fit(callback=timed, ckpt_path=None, steps=3)
    assert "timed-step=3.ckpt" in durable(dirpath)
    if "save_on_exception" in TieredModelCheckpoint.__mro__[1].__init__.__code__.co_varnames:
        dying = TieredModelCheckpoint(every_n_epochs=1, filename="died-{step}", save_on_exception=True)
        fit(callback=dying, ckpt_path=None, stop_at=4)
        assert "died-step=4.ckpt" in durable(dirpath)


def test_loggers_hear_of_durable_checkpoints_and_metrics(fit, dirpath):
    book = LogBook()
    callback = TieredModelCheckpoint(memory_every_n_train_steps=2, s3_every_n_train_steps=10, save_top_k=1)
    fit(callback=callback, logger=book)
    assert book.saved
    assert book.saved[-1] == f"{dirpath}/epoch=0-step=20.ckpt"
    seen = {key for _, metrics in book.metrics for key in metrics if key.startswith("checkpoint/")}
    assert {"checkpoint/stall_s", "checkpoint/staged_GiB_per_s", "checkpoint/pending", "checkpoint/drain_s"} <= seen


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_a_line(fit, bar):
    shown = []

    class Spy(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, module).get("ckpt"))

    fit(callback=steps_callback(), callbacks=[bar(), Spy()], enable_progress_bar=True)
    assert any(line and line.startswith("step ") for line in shown)


def test_test_with_best_after_fit(fit):
    class Tested(Model):
        def test_step(self, batch, _):
            self.log("t", self.layer(batch).mean())

        test_dataloader = Model.train_dataloader

    trainer, model = fit(callback=TieredModelCheckpoint(s3_every_n_train_steps=10), model=Tested())
    trainer.test(model, ckpt_path="best", verbose=False)


def test_lightnings_async_around_ours_and_foreign_ios_are_refused(dirpath, memory_dir, tmp_path):
    io = TieredCheckpointIO(dirpath=dirpath, memory_dir=memory_dir)
    for plugins, said in (([LightningAsync(io)], "copies the whole state"), ([], "TieredCheckpointIO")):
        trainer = Trainer(
            plugins=plugins,
            callbacks=[steps_callback()],
            max_steps=1,
            logger=False,
            accelerator="cpu",
            default_root_dir=tmp_path,
        )
        with pytest.raises(UsageError, match=said):
            trainer.fit(Model())
    wrapped = LightningAsync(io)
    with pytest.raises(UsageError, match="copies the whole state"):
        wrapped.save_checkpoint({"a": 1}, f"{io.config.dirpath}/x.ckpt")
        wrapped.teardown()
    with pytest.raises(UsageError, match="TieredCheckpointIO only"):
        AsyncCheckpointIO(wrapped)


def test_from_config(dirpath):
    block = {
        "dirpath": dirpath,
        "enable_async_checkpointing": True,
        "memory_every_n_train_steps": 10,
        "s3_every_n_train_steps": 50,
    }
    for given in (block, OmegaConf.create(block)):
        assert isinstance(TieredCheckpointIO.from_config(given), AsyncCheckpointIO)
        callback = TieredModelCheckpoint.from_config(given, monitor="x")
        assert callback._every_n_train_steps == 50
        assert callback.memory_every_n_train_steps == 10
    assert isinstance(TieredCheckpointIO.from_config(block, enable_async_checkpointing=False), TieredCheckpointIO)
    with pytest.raises(ConfigError, match="memory_every_n_train_steps"):
        TieredCheckpointIO.from_config({**block, "memory_every_n_train_step": 1})
    with pytest.raises(ConfigError, match="set one"):
        TieredModelCheckpoint(s3_every_n_train_steps=5, every_n_train_steps=5)


def test_tiers_are_a_function_of_the_step():
    assert [sorted(tiers_for_step(step, 2, 3)) for step in range(7)] == [
        [],
        [],
        ["memory"],
        ["durable", "memory"],
        ["memory"],
        [],
        ["durable", "memory"],
    ]


def test_lightning_asks_nothing_of_s3_itself(s3_url, memory_dir, tmp_path, monkeypatch):
    """s3fs, through which Lightning would ask, is never called."""
    import s3fs

    asked = []
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", lambda *args, **_: asked.append(args[1]))
    for _ in range(2):
        io = TieredCheckpointIO(dirpath=s3_url, memory_dir=memory_dir)
        trainer = Trainer(
            plugins=[AsyncCheckpointIO(io)],
            callbacks=[steps_callback(save_last=True)],
            max_steps=6,
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Model(), ckpt_path="tiered:latest")
    assert asked == []


DDP = """
import os, sys, torch
from lightning.pytorch import Trainer
sys.path.insert(0, sys.argv[3])
from test_training import Model
from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
io = TieredCheckpointIO(dirpath=sys.argv[1], memory_dir=sys.argv[2], wait_timeout_s=60)
trainer = Trainer(
    plugins=[AsyncCheckpointIO(io)], callbacks=[TieredModelCheckpoint(s3_every_n_train_steps=2, memory_every_n_train_steps=1)],
    max_steps=int(sys.argv[4]), accelerator="cpu", devices=int(sys.argv[5]), strategy="ddp", logger=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(ballast=1_000_000), ckpt_path="tiered:latest")
restored = io.checkpointer.restored
counts = io.checkpointer.asked
line = f"RANK {trainer.global_rank} FROM {restored and (restored.step, restored.tier)} ASKED {counts}\\n"
# One write, so that ranks do not write into each other's lines.
os.write(1, line.encode())
"""


def test_four_ddp_ranks_resume_and_only_rank_0_asks_s3(s3_url, memory_dir, tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(textwrap.dedent(DDP))

    def run(steps, ranks):
        command = [sys.executable, str(script), s3_url, memory_dir, str(Path(__file__).parent), str(steps), str(ranks)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=150, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))

    run(4, 1)
    wipe(memory_dir)
    first, *others = run(6, 4)
    assert "FROM (4, 'durable')" in first
    asked = ast.literal_eval(first.partition("ASKED ")[2])
    store = open_store(TieredCheckpointConfig(dirpath=s3_url))
    (size,) = {entry.size for entry in store.list("") if entry.key.endswith(".ckpt")}
    store.close()
    assert asked["requests.list"] == 1
    # The manifest, and the object in one range of 16 MiB.
    assert asked["requests.get"] == 2
    assert size < asked["bytes.down"] < 1.02 * size
    assert len(others) == 3
    for other in others:
        assert "FROM (4, 'durable')" in other
        assert "ASKED {}" in other
