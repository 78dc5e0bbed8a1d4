"""The end of training: the last steps become durable, and no checkpoint of an earlier fit counts as this one's."""

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import _TunerExitException
from support.training import Model, Stop

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint


def every(**more):
    return TieredModelCheckpoint(
        **{"memory_every_n_train_steps": 2, "s3_every_n_train_steps": 10, "save_last": True, **more}
    )


def memory_alone():
    return TieredModelCheckpoint(memory_every_n_train_steps=2, save_top_k=0)


def test_the_last_steps_survive_the_loss_of_the_node(runs_on_each):
    runs = runs_on_each
    # Without save_last: some releases of Lightning save that at the end of each epoch, and so when training ends.
    callback = every(save_last=None)
    runs.fit(callback, max_steps=17)
    # The top-k does not know of it.
    assert runs.durable() == ["end_of_training.ckpt", "epoch=0-step=10.ckpt"]
    assert callback.best_model_path == f"{runs.dirpath}/epoch=0-step=10.ckpt"
    runs.wipe()
    trainer, _ = runs.fit(every(save_last=None), max_steps=25)
    restored = trainer.io.checkpointer.restored
    assert (restored.name, restored.step, restored.tier) == ("end_of_training.ckpt", 17, "durable")
    assert trainer.global_step == 25
    runs.wipe()
    io = runs.io()
    assert io.load_checkpoint("tiered:latest")["global_step"] == 25
    assert runs.durable() == ["end_of_training.ckpt", "epoch=0-step=20.ckpt"]
    io.teardown()


@pytest.mark.parametrize(
    ("callback", "options", "expected"),
    [
        # Durable already, or not to be durable; no steps in memory; no training; a trial.
        (every, {"max_steps": 20}, ["epoch=0-step=20.ckpt", "last.ckpt"]),
        (lambda: every(save_on_train_end=False), {"max_steps": 13}, ["epoch=0-step=10.ckpt", "last.ckpt"]),
        (lambda: every(memory_every_n_train_steps=None), {"max_steps": 13}, ["epoch=0-step=10.ckpt", "last.ckpt"]),
        (every, {"limit_train_batches": 0}, []),
        (lambda: every(memory_every_n_train_steps=1), {"fast_dev_run": 3}, []),
        # No other trigger at all; nothing else but weights.
        (memory_alone, {"max_steps": 5}, ["end_of_training.ckpt"]),
        (
            lambda: every(save_weights_only=True, save_last=None),
            {"max_steps": 10},
            ["end_of_training.ckpt", "epoch=0-step=10.ckpt"],
        ),
    ],
)
def test_what_ends_and_what_is_durable_then(callback, options, expected, runs):
    runs.fit(callback(), ckpt_path=None, **options)
    assert runs.durable() == expected


class Batches(Model):
    """Notes the step, epoch and number of each batch."""

    def __init__(self, until=0):
        super().__init__()
        self.until, self.seen = until, []

    def on_train_batch_start(self, batch, index):
        self.seen.append((self.global_step, self.current_epoch, index))

    def on_train_batch_end(self, *_):
        # The same as max_time does.
        self.trainer.should_stop = self.trainer.should_stop or self.global_step == self.until


class SavesTheEnd(Callback):
    def on_train_end(self, trainer, *_):
        trainer.save_checkpoint(f"{trainer.io.config.dirpath}/saved.ckpt")


#: Causes of a save at the end of training: its end, an epoch's end, "last", the user.
SAVING = {
    "end_of_training.ckpt": [memory_alone],
    "epoch={}-step={}.ckpt": [TieredModelCheckpoint],
    "last.ckpt": [lambda: TieredModelCheckpoint(s3_every_n_train_steps=100, save_last=True)],
    "saved.ckpt": [lambda: TieredModelCheckpoint(save_top_k=0), SavesTheEnd],
}


@pytest.mark.parametrize(
    ("saved", "how", "ended"),
    [
        ("end_of_training.ckpt", "max_steps", 13),
        ("end_of_training.ckpt", "should_stop", 30),
        ("epoch={}-step={}.ckpt", "should_stop", 13),
        ("epoch={}-step={}.ckpt", "max_steps", 30),
        pytest.param("last.ckpt", "should_stop", 30, marks=pytest.mark.matrix),
        pytest.param("saved.ckpt", "max_steps", 13, marks=pytest.mark.matrix),
    ],
)
def test_the_run_after_it_goes_on_with_the_epoch_where_training_ended(saved, how, ended, runs):
    """Without this the rest of the epoch counts as the next one, and one epoch less is trained."""
    window = {"max_steps": ended} if how == "max_steps" else {"max_steps": -1, "max_epochs": 3}
    until = ended if how == "should_stop" else 0
    runs.fit(*(each() for each in SAVING[saved]), model=Batches(until), ckpt_path=None, **window)
    name = saved.format(ended // 20, ended)
    assert name in runs.durable()
    for rest in ({"max_steps": -1, "max_epochs": 3}, {"max_steps": 60}):
        after = Batches()
        runs.fit(model=after, ckpt_path=name, **rest)
        assert after.seen == [(step, step // 20, step % 20) for step in range(ended, 60)], rest


class Leaves(Callback):
    """Ends training in order, within a batch, as NeMo's time limit does."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index + 1 == self.at:
            raise _TunerExitException


@pytest.mark.parametrize("saves", [True, False])
def test_a_training_that_leaves_a_batch_ends_on_the_durable_tier_too(saves, runs):
    runs.fit(memory_alone(), Leaves(5), io=runs.io(save_on_train_end=saves))
    assert runs.durable() == (["end_of_training.ckpt"] if saves else [])
    runs.wipe()
    trainer, _ = runs.fit(memory_alone(), max_steps=6)
    assert getattr(trainer.io.checkpointer.restored, "step", None) == (5 if saves else None)


def test_neither_a_crash_nor_a_restart_that_fails_is_an_end_and_the_run_after_them_makes_up_for_it(runs):
    class Failing(Callback):
        def on_load_checkpoint(self, *_):
            raise Stop

    runs.fit(memory_alone(), stop_at=5)
    assert runs.durable() == []
    runs.fit(memory_alone(), Failing(), max_steps=4)
    assert runs.durable() == []
    # Ends before its own first step in memory.
    trainer, _ = runs.fit(memory_alone(), max_steps=5)
    assert trainer.io.checkpointer.restored.step == 4
    assert runs.durable() == ["end_of_training.ckpt"]


@pytest.mark.parametrize("by_name", [False, True])
def test_an_evaluation_after_a_crash_is_no_end_of_the_training(by_name, runs):
    """The evaluation has the weights of another checkpoint, or those of the crash."""
    runs.fit(every(), max_steps=13)
    trainer, model = runs.fit(every(), max_steps=30, stop_at=17)
    assert (trainer.io.checkpointer.restored.step, trainer.global_step) == (13, 17)

    def held():
        io = runs.io()
        steps = {name: io.load_checkpoint(name)["global_step"] for name in runs.durable()}
        io.teardown()
        return steps

    before = held()
    # Some releases of Lightning save "last" when training ends.
    assert max(before.values()) == 13
    trainer.test(model, ckpt_path=f"{runs.dirpath}/last.ckpt" if by_name else None, verbose=False)
    assert held() == before


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_restart_that_has_nothing_left_to_train_makes_up_for_it_as_well(asynchronous, runs_on_each):
    runs = runs_on_each
    # In the middle of the second epoch.
    runs.fit(memory_alone(), max_steps=25, max_epochs=-1, limit_train_batches=10, stop_at=24)
    assert runs.durable() == []
    again = {"max_steps": 24, "max_epochs": -1, "limit_train_batches": 10, "asynchronous": asynchronous}
    callback = every(save_last=None, save_on_train_end=False)
    runs.fit(callback, **again)
    assert runs.durable() == [], "is not wanted"
    trainer, _ = runs.fit(every(), **again)
    assert (trainer.io.checkpointer.restored.step, trainer.global_step) == (24, 24)
    assert runs.durable() == ["end_of_training.ckpt"]
    runs.wipe()
    trainer, _ = runs.fit(every(), **again)
    assert trainer.io.checkpointer.restored.name == "end_of_training.ckpt"
    assert runs.durable() == ["end_of_training.ckpt"]
    (saved, restored) = (runs.io().load_checkpoint("end_of_training.ckpt"), Batches())
    assert saved["global_step"] == 24
    runs.fit(model=restored, **{**again, "max_steps": 27})
    assert [(step, epoch) for step, epoch, _ in restored.seen] == [(24, 2), (25, 2), (26, 2)]


def test_a_second_fit_with_the_same_callback_is_a_training_of_its_own(runs):
    """The second one's step 10 is another state, and has its own "last", though its step is not among the best."""
    callback = every(monitor="score", mode="max", memory_every_n_train_steps=None)
    runs.fit(callback, max_steps=10, ckpt_path=None)
    other = Model()
    other.layer.weight.data.fill_(7)
    callback.current_score = None
    trainer, _ = runs.fit(callback, model=other, max_steps=10, ckpt_path=None)
    for path in (callback.last_model_path, "last.ckpt"):
        state = trainer.io.load_checkpoint(path)
        assert state["global_step"] == 10
        assert state["state_dict"]["layer.weight"].equal(other.layer.weight)
    trainer.io.teardown()
    trainer.test(Model(), ckpt_path="best", verbose=False)
    again, _ = runs.fit(every(monitor="score", mode="max"), ckpt_path="last", max_steps=12)
    assert again.io.checkpointer.restored.step == 10
