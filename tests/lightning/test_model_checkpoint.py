"""TieredModelCheckpoint where things go wrong, or stand side by side."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsync
from lightning.pytorch.tuner import Tuner
from support.training import LogBook, Model

from tiered_checkpoint_io import AsyncCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint, model_checkpoint, tiers_for_step
from tiered_checkpoint_io.callbacks.reporting import Reporter, line_of
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.progress import Progress, SaveReport
from tiered_checkpoint_io.engine.drain.queue import DrainProgress
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, InvalidNameError, StoreUnavailableError, UsageError
from tiered_checkpoint_io.model import ids


def newest(**more):
    return TieredModelCheckpoint(**{"s3_every_n_train_steps": 5, "save_top_k": 1, "save_last": True, **more})


@pytest.fixture
def failing(monkeypatch):
    """Makes saves of the given steps fail, as with on_save_error=warn."""
    steps = set()
    save = Checkpointer.save

    def save_or_not(self, state, path, **options):
        if state["global_step"] in steps:
            return None
        return save(self, state, path, **options)

    monkeypatch.setattr(Checkpointer, "save", save_or_not)
    return steps


def test_a_failed_save_deletes_nothing_and_the_next_good_one_makes_up_for_it(runs, failing):
    failing.add(10)
    # The memory step carries over the crash what was not deleted.
    runs.fit(newest(memory_every_n_train_steps=11), stop_at=12)
    assert runs.durable() == ["epoch=0-step=5.ckpt", "last.ckpt"]
    trainer, _ = runs.fit(newest(memory_every_n_train_steps=11), stop_at=16)
    assert trainer.io.checkpointer.restored.step == 11
    assert runs.durable() == ["epoch=0-step=15.ckpt", "last.ckpt"]
    assert trainer.io.load_checkpoint("last.ckpt")["global_step"] == 15
    trainer.io.teardown()


def test_another_run_is_left_alone(runs, tmp_path):
    """A run that starts from another's checkpoint, elsewhere, deletes nothing of it."""
    first = newest()
    runs.fit(first, max_steps=5)
    mine = type(runs)(str(tmp_path / "mine"), runs.memory_dir, tmp_path)
    with pytest.warns(UserWarning, match="dirpath has changed"):
        mine.fit(newest(), ckpt_path=first.best_model_path, max_steps=15)
    assert runs.durable() == ["epoch=0-step=5.ckpt", "last.ckpt"]
    assert mine.durable() == ["epoch=0-step=15.ckpt", "last.ckpt"]


def test_two_callbacks_share_memory_steps_and_each_tells_its_own(runs):
    book = LogBook(runs.dirpath)
    best = newest(memory_every_n_train_steps=2, monitor="score", mode="max", filename="best-{step}", save_last=False)
    each = newest(memory_every_n_train_steps=2, s3_every_n_train_steps=10, save_last=False)
    runs.fit(best, each, logger=book)
    steps = [step for step, metrics in book.metrics if "checkpoint/stall_s" in metrics]
    assert sorted(set(steps)) == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20]
    # Both save step 10 and 20, if it is among the best; nothing else is saved twice.
    assert {step for step in steps if steps.count(step) > 1} <= {10, 20}
    assert {best.best_model_path, each.best_model_path} <= {path for path, *_ in book.told}


def test_memory_steps_hold_the_whole_state(runs):
    runs.fit(newest(save_weights_only=True, memory_every_n_train_steps=2, save_last=False), stop_at=8)
    trainer, _ = runs.fit(newest(save_weights_only=True, memory_every_n_train_steps=2, save_last=False))
    assert trainer.io.checkpointer.restored.name == "memory/epoch=0-step=8.ckpt"
    assert trainer.global_step == 20


def test_names_that_cannot_be_looked_up_do_not_stop_training(runs, monkeypatch):
    asked = []

    def exists(self, path):
        asked.append(path)
        raise StoreUnavailableError("away")

    monkeypatch.setattr(Checkpointer, "exists", exists)
    with pytest.warns(UserWarning, match="may repeat those of earlier ones"):
        runs.fit(newest())
    assert len(asked) == 1
    assert runs.durable() == ["epoch=0-step=20.ckpt", "last.ckpt"]


def test_a_durable_tier_that_is_back_is_asked_again_which_names_are_taken(runs, monkeypatch):
    each = {"save_top_k": -1, "save_last": False, "s3_every_n_train_steps": 10}
    runs.fit(newest(**each))
    exists, asked = Checkpointer.exists, []

    def away_at_first(self, path):
        asked.append(path)
        if len(asked) == 1:
            raise StoreUnavailableError("away")
        return exists(self, path)

    monkeypatch.setattr(Checkpointer, "exists", away_at_first)
    monkeypatch.setattr(model_checkpoint, "_REST", 0)
    with pytest.warns(UserWarning, match="may repeat those of earlier ones"):
        runs.fit(newest(**each), ckpt_path=None)
    assert runs.durable() == ["epoch=0-step=10.ckpt", "epoch=0-step=20-v1.ckpt", "epoch=0-step=20.ckpt"]


def test_a_look_costs_no_more_where_the_path_of_every_save_is_kept(runs, monkeypatch):
    parsed, polled = [], []

    class Looking(Model):
        def on_train_batch_end(self, *_):
            if self.global_step == 12:
                kept, callback.best_k_models = callback.best_k_models, dict.fromkeys(many, torch.tensor(0.0))
                poll, name_in, session = Session.poll, ids.name_in, callback._engine.session

                def polling(session):
                    outcomes = poll(session)
                    polled.append(session.clock.monotonic())
                    return outcomes

                with monkeypatch.context() as patch:
                    patch.setattr(ids, "name_in", lambda *path: parsed.append(path) or name_in(*path))
                    patch.setattr(Session, "poll", polling)
                    callback._look_after(self.trainer)
                callback.best_k_models = kept
                # However long it takes, training gets on before the next one.
                assert session.clock.monotonic() >= callback._polled >= polled[0]

    many = [f"{runs.dirpath}/epoch=0-step={number}.ckpt" for number in range(1000)]
    callback = newest(monitor="score", save_top_k=-1, save_last=False)
    runs.fit(callback, model=Looking())
    assert len(polled) == 1
    assert len(parsed) < 10


def test_loggers_are_told_once_all_that_they_are_shown_is_durable():
    told, pending, shown = [], set(), {"run/a", "run/b"}
    trainer = SimpleNamespace(loggers=[SimpleNamespace(after_save_checkpoint=told.append)])
    reporter = Reporter(newest())

    def publish(*names):
        outcomes = [SimpleNamespace(name=name, action="save", state="committed", step=1) for name in names]
        progress = Progress(0, DrainProgress(), None)
        reporter.publish(trainer, outcomes, progress, is_shown=shown.__contains__, is_pending=pending.__contains__)
        return len(told)

    for name in "abc":
        reporter.expect(name, f"run/{name}", pending=True)
    assert publish() == 0
    assert publish("a") == 0, "b is still on its way"
    assert publish("b") == 1, "c is not among the best any more"
    assert publish("c") == 2
    reporter.expect("a", "run/a", pending=True)
    pending.add("a")
    assert publish("a") == 2, "it is queued anew"


def test_a_logger_that_fails_is_warned_of_once_and_training_goes_on(runs):
    class Failing(LogBook):
        def after_save_checkpoint(self, callback):
            raise FileNotFoundError("s3://bucket/x.ckpt")

    other = LogBook(runs.dirpath)
    with pytest.warns(UserWarning, match=r"Failing failed to log a checkpoint.*FileNotFoundError: s3:") as said:
        trainer, _ = runs.fit(newest(), logger=[Failing(runs.dirpath), other], asynchronous=False)
    assert trainer.global_step == 20
    assert sum("failed to log" in str(each.message) for each in said) == 1
    assert len(other.told) > 1


def test_lightnings_async_around_ours_and_foreign_ios_are_refused(runs):
    io = runs.io()
    for plugins, said in (([LightningAsync(io)], "copies the whole state"), ([], "TieredCheckpointIO")):
        with pytest.raises(UsageError, match=said):
            runs.trainer([newest()], plugins=plugins).fit(Model())
    wrapped = LightningAsync(io)
    with pytest.raises(UsageError, match="copies the whole state"):
        wrapped.save_checkpoint({"a": 1}, f"{io.config.dirpath}/x.ckpt")
        wrapped.teardown()
    with pytest.raises(UsageError, match="TieredCheckpointIO only"):
        AsyncCheckpointIO(wrapped)


def test_sharded_strategies_are_refused(runs):
    trainer = runs.trainer([callback := newest()])

    class FSDPStrategy(type(trainer.strategy)):
        pass

    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(UsageError, match="past the checkpoint IO"):
        callback.setup(trainer, Model(), "fit")


def test_dirpaths_and_steps_that_are_not_allowed(runs, tmp_path):
    for dirpath in (str(tmp_path / "elsewhere"), runs.dirpath + "-2"):
        with pytest.raises(ConfigError, match="not below the IO's"):
            runs.trainer([newest(dirpath=dirpath)]).fit(Model())
    below = newest(dirpath=runs.dirpath + "/below/", save_last=False)
    runs.fit(below, max_steps=5)
    assert runs.durable() == ["below/epoch=0-step=5.ckpt"]
    with pytest.raises(ConfigError, match="set one"):
        TieredModelCheckpoint(s3_every_n_train_steps=5, every_n_train_steps=5)
    for value in (0, -1, True, 2.5, "5"):
        with pytest.raises(ConfigError, match="memory_every_n_train_steps"):
            TieredModelCheckpoint(memory_every_n_train_steps=value)
    with pytest.raises(InvalidNameError, match="bucket"):
        TieredModelCheckpoint(dirpath="s3://")


@pytest.mark.parametrize(
    "options",
    [
        {"tier": ["memory"]},
        {"tiers": []},
        {"tiers": ["disk"]},
        {"tiers": 5},
        {"tiers": [["memory"]]},
        {"metric": "loss"},
        {"metric": ("loss", "low")},
        {"metric": (1, 2.0)},
        "memory",
        ["memory"],
    ],
)
def test_storage_options_that_are_not_understood(runs, options):
    io = runs.io()
    with pytest.raises(UsageError, match=r"storage_options.*allowed: \{'tiers'"):
        io.save_checkpoint({"global_step": 1}, "a.ckpt", storage_options=options)
    assert not io.load_checkpoint("tiered:latest")
    io.teardown()


def test_an_io_is_pickled_without_its_engine_and_may_be_used_again_after_teardown(runs):
    io = runs.io()
    io.save_checkpoint({"global_step": 1}, "a.ckpt", storage_options={"tiers": "memory"})
    copy = pickle.loads(pickle.dumps(AsyncCheckpointIO(io)))
    io.teardown()
    io.teardown()
    for each in (io, copy):
        assert each.load_checkpoint("tiered:latest")["global_step"] == 1
        each.teardown()


@pytest.mark.parametrize("url", [None, ".", "../logs", "memory://scratch/logs"])
def test_the_tuner_keeps_its_scratch_file_out_of_the_tiers(url, runs, monkeypatch):
    (runs.root / "logs").mkdir()
    monkeypatch.chdir(runs.root / "logs" if url == "../logs" else runs.root)
    trainer = runs.trainer([newest()], default_root_dir=url or runs.root)
    model = Model()
    found = Tuner(trainer).lr_find(model, num_training=5, update_attr=False)
    assert found.suggestion is not None
    assert runs.durable() == []
    assert list(runs.root.rglob(".lr_find*")) == []
    assert url is None or "://" not in url or fsspec.filesystem("memory").find(url) == []


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
    assert not any(tiers_for_step(step, None, None) for step in range(7))
    assert not tiers_for_step(9, 10, 20, since=3)
    assert tiers_for_step(21, 10, None, since=19) == {"memory"}
    assert tiers_for_step(23, 10, 20, since=17) == {"memory", "durable"}


class Several(Model):
    """Two optimizers, of which one waits for the first batch: no batch ends with an even step."""

    automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 if self.global_step == 0 else 2]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD([each], lr=0.01) for each in self.parameters()]


def test_a_step_that_a_batch_passes_over_is_saved_after_it(runs, monkeypatch):
    saved, save = [], Checkpointer.save
    monkeypatch.setattr(Checkpointer, "save", lambda self, *a, **k: saved.append(a[1]) or save(self, *a, **k))
    callback = TieredModelCheckpoint(memory_every_n_train_steps=4, s3_every_n_train_steps=10, save_last=True)
    trainer, _ = runs.fit(callback, model=Several(), max_steps=25)
    assert [path.removeprefix(f"{runs.dirpath}/") for path in saved[:7]] == [
        "memory/epoch=0-step=5.ckpt",
        "memory/epoch=0-step=9.ckpt",
        "epoch=0-step=11.ckpt",
        "memory/epoch=0-step=13.ckpt",
        "memory/epoch=0-step=17.ckpt",
        "epoch=0-step=21.ckpt",
        "memory/epoch=0-step=25.ckpt",
    ]
    # Lightning 2.4 makes last anew where training ends; the step that it ends with is durable in any case.
    end = [trainer.io.load_checkpoint(path)["global_step"] for path in ("last.ckpt", saved[7])]
    assert end in ([21, 25], [25, 25])
    trainer.io.teardown()


def test_the_line_in_the_progress_bar():
    save = SaveReport("a", 90, "id", 1, 0.061, frozenset({"memory"}))
    drain = DrainProgress(name="epoch=0-step=50.ckpt", bytes_done=62, bytes_total=100)
    assert line_of(Progress(2, drain, save, {"failed": 1})) == "mem 90 0.06s | durable 50 62% | 2 waiting | 1 failed"
    assert line_of(Progress(0, DrainProgress(), save), durable_step=50) == "mem 90 0.06s | durable 50"
    assert not line_of(Progress(0, DrainProgress(), None))


def test_best_k_models_are_written_as_yaml(runs):
    callback = newest(monitor="score", save_last=False)
    runs.fit(callback, max_steps=5)
    callback.to_yaml()
    assert "epoch=0-step=5.ckpt" in Path(runs.dirpath, "best_k_models.yaml").read_text()
