"""Training stories with a real Trainer: killed, resumed, pruned; both tiers, both IOs."""

import contextlib
import functools
import inspect
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from support.clocks import quick
from support.tenants import descriptors_to_spare
from support.training import LogBook, Model, Stop

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import CheckpointNotFoundError, SaveError


def every(**more):
    return TieredModelCheckpoint(
        **{"memory_every_n_train_steps": 2, "s3_every_n_train_steps": 5, "save_top_k": -1, **more}
    )


def best_two():
    return TieredModelCheckpoint(
        memory_every_n_train_steps=1,
        s3_every_n_train_steps=2,
        monitor="score",
        mode="max",
        save_top_k=2,
        save_last=True,
    )


def test_stopped_resumed_from_memory_then_from_the_durable_tier_is_as_never_stopped(runs_on_each):
    runs = runs_on_each
    runs.drain = "process"
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


class Loader:
    """Knows how far it is, as torchdata's StatefulDataLoader."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        start, self.position = self.position, 0
        for self.position, batch in enumerate(self.batches[start:], start + 1):
            yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position, self.is_restored = state["position"], True


@pytest.mark.parametrize("when", ["within an epoch", "at its end"])
def test_a_data_loader_s_state_that_a_resume_leaves_out_is_said_once(runs, caplog, when):
    model, loader = Model(), Loader([torch.zeros(2, 8)] * 4)
    model.train_dataloader = lambda: loader
    callback = TieredModelCheckpoint(
        **{"s3_every_n_train_steps": 2} if when == "within an epoch" else {"every_n_epochs": 1}, save_top_k=-1
    )
    runs.fit(callback, model=model, max_epochs=1, max_steps=-1, ckpt_path=None)
    first = runs.durable()[0]
    model.train_dataloader = lambda: again
    again = Loader(loader.batches)
    runs.fit(every(), model=model, ckpt_path=f"{runs.dirpath}/{first}", max_epochs=2, max_steps=-1)
    said = [record.getMessage() for record in caplog.records if "data loader" in record.getMessage()]
    # At the end of an epoch, releases of Lightning differ.
    restored = vars(again).get("is_restored", False)
    assert restored or when == "at its end"
    assert len(said) == (0 if restored else 1), said
    assert restored or "does not restore the state of 1 data loader that the checkpoint holds" in said[0]


def test_a_resume_that_lightnings_tuner_undoes_is_told(runs, caplog):
    def told():
        return [record.getMessage() for record in caplog.records if "training begins at step" in record.getMessage()]

    def finder():
        return LearningRateFinder(num_training_steps=5, update_attr=False)

    runs.fit(every(), finder(), stop_at=7)
    runs.fit(every(), stop_at=9)
    assert told() == []
    runs.fit(every(), finder(), stop_at=7)
    (said,) = told()
    assert said.startswith("training begins at step 0, though memory/epoch=0-step=8.ckpt is of step 8: its weights")


def test_top_k_is_kept_over_a_resume(runs_on_each):
    runs = runs_on_each
    first = best_two()
    runs.fit(first, stop_at=11)
    assert len(first.best_k_models) == 2
    second = best_two()
    trainer, _ = runs.fit(second)
    resumed_from = trainer.io.checkpointer.restored.name
    assert resumed_from.startswith("memory/")
    scores = {path: float(score) for path, score in second.best_k_models.items()}
    assert set(runs.durable()) == {path.removeprefix(runs.dirpath + "/") for path in scores} | {"last.ckpt"}
    assert not [path for path in scores if "memory/" in path]
    assert len(scores) == 2
    assert scores[second.best_model_path] == max(scores.values())
    # Steps 8 and 18, one of each life, score best.
    assert sorted(scores.values()) == [9.0, 9.0]
    assert trainer.io.load_checkpoint(second.best_model_path)["global_step"]
    trainer.io.teardown()


def test_what_a_run_resumed_from_stays_until_the_next_run_has_saved(runs):
    def newest():
        return TieredModelCheckpoint(s3_every_n_train_steps=5, save_top_k=1)

    runs.fit(newest(), stop_at=6)
    for start, steps in ((5, 10), (10, 15)):
        runs.wipe()
        trainer, _ = runs.fit(newest(), stop_at=steps + 1, max_steps=30)
        assert trainer.io.checkpointer.restored.step == start
        assert runs.durable() == sorted(f"epoch=0-step={step}.ckpt" for step in (start, steps))


@pytest.mark.parametrize("options", [{}, pytest.param({"monitor": "step", "mode": "max"}, marks=pytest.mark.matrix)])
def test_what_a_save_was_to_replace_goes_where_the_run_was_killed_before_that(options, runs, monkeypatch):
    """As while a save waits for its upload, which the next start finishes."""

    def newest():
        return TieredModelCheckpoint(s3_every_n_train_steps=5, save_top_k=1, **options)

    def killed(*_):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(TieredModelCheckpoint, "_remove_checkpoint", killed)
        trainer, _ = runs.fit(newest(), asynchronous=False)
    assert trainer.global_step == 10
    assert runs.durable() == ["epoch=0-step=10.ckpt", "epoch=0-step=5.ckpt"]
    runs.fit(newest(), max_steps=15)
    # What the run resumed from stays.
    assert runs.durable() == ["epoch=0-step=10.ckpt", "epoch=0-step=15.ckpt"]


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_save_last_uploads_nothing_and_last_resumes(runs_on_each, asynchronous):
    runs = runs_on_each
    callback = TieredModelCheckpoint(s3_every_n_train_steps=5, save_top_k=1, save_last=True)
    trainer, _ = runs.fit(callback, asynchronous=asynchronous)
    assert runs.durable() == ["epoch=0-step=20.ckpt", "last.ckpt"]
    assert callback.last_model_path == f"{runs.dirpath}/last.ckpt"
    assert trainer.io.load_checkpoint(callback.last_model_path)["global_step"] == 20
    trainer.io.teardown()
    runs.wipe()
    again = TieredModelCheckpoint(s3_every_n_train_steps=5, save_top_k=1, save_last=True)
    resumed, _ = runs.fit(again, ckpt_path="last", max_steps=25, max_epochs=9)
    assert resumed.io.checkpointer.restored.step == 20
    assert resumed.global_step == 25


def test_last_alone_is_a_checkpoint_of_its_own_and_may_become_an_alias(runs):
    # top-k is not due in the epochs in which last is.
    callback = TieredModelCheckpoint(every_n_epochs=2, save_top_k=-1, save_last=True)
    runs.fit(callback, max_steps=-1, max_epochs=3)
    names = runs.durable()
    assert "last.ckpt" in names
    assert "epoch=1-step=40.ckpt" in names
    runs.wipe()
    io = runs.io()
    assert io.load_checkpoint("last.ckpt")["global_step"] in (40, 60)
    io.teardown()


def test_last_and_latest_without_any_start_from_scratch_but_are_no_test(runs):
    for sentinel, named in (("last", " that is named last"), ("tiered:latest", "")):
        trainer, _ = runs.fit(every(memory_every_n_train_steps=None), ckpt_path=sentinel, max_steps=3)
        assert trainer.global_step == 3
        trainer = runs.trainer([every()])
        with pytest.raises(CheckpointNotFoundError, match=f"no checkpoint{named} to resume from at"):
            trainer.test(Model(), ckpt_path=sentinel, verbose=False)


def test_a_last_that_is_weights_alone_is_evaluated_and_no_training_begins_anew_over_it(runs):
    save = {"s3_every_n_train_steps": 5, "save_last": True, "save_weights_only": True}
    _, model = runs.fit(TieredModelCheckpoint(**save), ckpt_path=None)
    trainer = runs.trainer([TieredModelCheckpoint(**save)])
    fresh = Model()
    trainer.test(fresh, ckpt_path="last", verbose=False)
    assert torch.equal(fresh.layer.weight, model.layer.weight)
    # As Lightning has it.
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        runs.fit(TieredModelCheckpoint(**save), ckpt_path="last", max_steps=30)
    assert runs.io().load_checkpoint("last.ckpt")["global_step"] == 20


def test_epochs_time_and_exceptions_trigger_durable_saves(runs):
    runs.fit(TieredModelCheckpoint(every_n_epochs=1, save_top_k=-1), max_steps=-1, max_epochs=2, ckpt_path=None)
    assert runs.durable() == ["epoch=0-step=20.ckpt", "epoch=1-step=40.ckpt"]
    timed = TieredModelCheckpoint(train_time_interval=timedelta(microseconds=1), filename="timed-{step}", save_top_k=1)
    runs.fit(timed, ckpt_path=None, max_steps=3)
    assert "timed-step=3.ckpt" in runs.durable()
    if "save_on_exception" in inspect.signature(ModelCheckpoint).parameters:
        dying = TieredModelCheckpoint(every_n_epochs=1, filename="died-{step}", save_on_exception=True, save_last=True)
        runs.fit(dying, ckpt_path=None, stop_at=4)
        assert "died-step=4.ckpt" in runs.durable()


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_loggers_hear_of_checkpoints_only_once_they_are_durable(runs, asynchronous):
    book = LogBook(runs.dirpath)
    callback = TieredModelCheckpoint(
        memory_every_n_train_steps=2, s3_every_n_train_steps=10, save_top_k=1, save_last=True
    )
    runs.fit(callback, logger=book, asynchronous=asynchronous)
    assert book.told
    for best, last, names in book.told:
        assert {Path(path).name for path in (best, last) if path} <= set(names)
    assert book.told[-1][0] == f"{runs.dirpath}/epoch=0-step=20.ckpt"
    seen = {key for _, metrics in book.metrics for key in metrics if key.startswith("checkpoint/")}
    saves = {
        "stall_s",
        "capture_s",
        "durable_step",
        "size_GiB",
        "staged_GiB_per_s",
        "pending",
        "saved_total",
        "failed_total",
    }
    assert seen - {"checkpoint/drain_s"} == {f"checkpoint/{key}" for key in saves}
    # Who waits for the commit has its time in the stall.
    assert ("checkpoint/drain_s" in seen) == asynchronous
    assert [step for step, metrics in book.metrics if "checkpoint/stall_s" in metrics] == [*range(2, 21, 2)]


@pytest.mark.parametrize("bar", [TQDMProgressBar, pytest.param(RichProgressBar, marks=pytest.mark.matrix)])
def test_progress_bars_show_a_line(runs, bar):
    shown = []

    class Spy(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, module).get("ckpt"))

    trainer, model = runs.fit(
        every(), every(s3_every_n_train_steps=10, filename="other-{step}"), Spy(), bar(), enable_progress_bar=True
    )
    assert shown[3].startswith("mem 2 ")
    assert any("durable " in line for line in shown if line)
    assert "ckpt" not in trainer.progress_bar_callback.get_metrics(trainer, model)


def test_best_is_tested_after_fit_and_by_its_name_elsewhere(runs):
    callback = TieredModelCheckpoint(s3_every_n_train_steps=10)
    trainer, model = runs.fit(callback)
    trainer.test(model, ckpt_path="best", verbose=False)
    runs.wipe()
    runs.trainer([TieredModelCheckpoint()]).test(model, ckpt_path=callback.best_model_path, verbose=False)


@pytest.mark.parametrize(("mode", "step"), [pytest.param("min", 4, marks=pytest.mark.matrix), ("max", 8)])
def test_best_is_found_by_a_process_that_has_not_trained(runs_on_each, mode, step):
    def watching(**more):
        return TieredModelCheckpoint(s3_every_n_train_steps=2, monitor="score", mode=mode, save_top_k=3, **more)

    trained = watching(memory_every_n_train_steps=1)
    runs_on_each.fit(trained, max_steps=15)
    runs_on_each.wipe()
    trainer = runs_on_each.trainer([watching()])
    for _ in range(2):
        trainer.test(Model(), ckpt_path="best", verbose=False)
        assert trainer.io.checkpointer.restored.step == step
    assert trained.best_model_path.endswith(f"step={step}.ckpt")
    resumed, _ = runs_on_each.fit(watching(), ckpt_path="best", max_steps=step + 1)
    assert resumed.io.checkpointer.restored.step == step
    other = TieredModelCheckpoint(monitor="unknown")
    with pytest.raises(CheckpointNotFoundError, match="tells a value of 'unknown'"):
        runs_on_each.fit(other, ckpt_path="best")


def test_the_best_by_step_is_found_by_a_process_that_has_not_trained(runs):
    def newest():
        return TieredModelCheckpoint(s3_every_n_train_steps=5, monitor="step", mode="max")

    runs.fit(newest(), ckpt_path=None)
    trainer = runs.trainer([newest()])
    trainer.test(Model(), ckpt_path="best", verbose=False)
    assert trainer.io.checkpointer.restored.step == 20


class OutOfDescriptors(Callback):
    """From one step to another, the process has none left."""

    def __init__(self, first, last):
        self.first, self.last = first, last
        self.stack = contextlib.ExitStack()

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.first:
            self.stack.enter_context(descriptors_to_spare(0))
        if trainer.global_step == self.last:
            self.stack.close()


@pytest.mark.timeout(120)
def test_training_goes_on_while_it_is_out_of_descriptors(runs):
    """Memory steps, durable ones, aliases and deletes: all of them fail for a while, and none stops it."""
    io = runs.io()
    io.checkpointer.session.clock = quick(outcome_poll_s=0.0)
    trainer, _ = runs.fit(OutOfDescriptors(5, 13), best_two(), io=io, asynchronous=True)
    assert trainer.global_step == 20
    assert io.checkpointer.session.counts["failed"] > 0
    runs.wipe()
    assert runs.io().load_checkpoint("tiered:latest")["global_step"] == 20


@pytest.mark.parametrize("on_save_error", ["warn", "raise"])
def test_what_fails_behind_training_is_told_while_it_goes_on(on_save_error, runs):
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
                    time.sleep(0 if session.progress().drain.last_error else 0.05)
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
