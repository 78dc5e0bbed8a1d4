"""When Lightning's ModelCheckpoint saves, and TieredModelCheckpoint."""

import itertools
import types
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import model_checkpoint
from support.as_lightning import Tiny, Topic
from torch.utils.data import DataLoader, IterableDataset

TRIGGERS = Topic("When a checkpoint is saved")


@pytest.mark.parametrize("case", TRIGGERS.cases, ids=str)
def test_triggers(case, tmp_path, memory_dir):
    seen, expected = case.run(tmp_path, memory_dir)
    assert seen == expected


def test_the_document_has_each_case_and_the_reverse():
    assert TRIGGERS.tested() == TRIGGERS.documented()


VALIDATING = {"limit_val_batches": 1, "limit_train_batches": 4, "max_epochs": 2}


def each(side, *callbacks, **fit):
    """What several callbacks leave in one training, each by names of its own."""
    callbacks = [
        side.callback(**{"save_top_k": -1, "filename": f"{i}-{{epoch}}-{{step}}", **a}) for i, a in enumerate(callbacks)
    ]
    side.fit(*callbacks, **fit)
    return [side.seen(callback) for callback in callbacks], side.saves


@TRIGGERS.same("`every_n_epochs`: 0 for never, 1, 2")
def _(side):
    # Each has another state key: Lightning allows no two callbacks of one key.
    return each(side, {"every_n_epochs": 0}, {"every_n_epochs": 1}, {"every_n_epochs": 2}, max_epochs=5)


@TRIGGERS.same("`every_n_train_steps`: 0 for never, or every so many over all epochs")
def _(side):
    return each(side, {"every_n_train_steps": 0}, {"every_n_train_steps": 3}, {"every_n_train_steps": 2})


@TRIGGERS.same("`train_time_interval`")
def _(side):
    with pytest.MonkeyPatch.context() as patch:
        seconds = itertools.count(step=7)
        patch.setattr(model_checkpoint, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
        arguments = {"train_time_interval": timedelta(seconds=20), "save_top_k": -1}
        return side.train(**arguments, fit={"limit_train_batches": 8, "max_epochs": 2}), side.saves


@TRIGGERS.same("`every_n_epochs`, `every_n_train_steps` and `train_time_interval` exclude each other")
def _(side):
    said = []
    minute = timedelta(minutes=1)
    for arguments in (
        {"every_n_train_steps": 1, "every_n_epochs": 2},
        {"train_time_interval": minute, "every_n_epochs": 2},
        {"train_time_interval": minute, "every_n_train_steps": 2},
        {"every_n_epochs": -3},
        {"every_n_train_steps": -3},
    ):
        with pytest.raises(Exception) as caught:
            side.callback(**arguments)
        said.append((type(caught.value).__name__, str(caught.value)))
    side.callback(every_n_train_steps=0, every_n_epochs=0, train_time_interval=minute)
    return said


@TRIGGERS.same("no trigger at all is every epoch")
def _(side):
    callback = side.callback()
    return callback.every_n_epochs, callback._every_n_train_steps, callback._train_time_interval


@TRIGGERS.same("a step and an epoch that end together: one save")
def _(side):
    return each(side, {"every_n_train_steps": 2}, {"every_n_epochs": 1, "every_n_train_steps": 0})


@TRIGGERS.same("`save_on_train_epoch_end=True` and `False`, with a validation")
def _(side):
    validating = {"monitor": "val/score", "mode": "max"}
    return each(
        side,
        {"save_on_train_epoch_end": True},
        {"save_on_train_epoch_end": False, **validating},
        **VALIDATING,
    )


@TRIGGERS.same("`save_on_train_epoch_end=False` without a validation")
def _(side):
    return each(side, {"save_on_train_epoch_end": False})


@TRIGGERS.same("validations within an epoch, `val_check_interval=0.5`")
def _(side):
    return each(side, {"monitor": "val/score"}, {}, **VALIDATING, val_check_interval=0.5)


@TRIGGERS.same("a validation every second epoch")
def _(side):
    fit = {**VALIDATING, "check_val_every_n_epoch": 2, "max_epochs": 5}
    return each(side, {"monitor": "val/score"}, {"every_n_epochs": 2}, **fit)


@TRIGGERS.same("a step whose metric comes with the next validation is saved after it")
def _(side):
    fit = {**VALIDATING, "val_check_interval": 0.5, "model": Tiny((1, 5, 2, 9))}
    return each(side, {"monitor": "val/score", "every_n_train_steps": 1, "mode": "max", "save_top_k": 1}, **fit)


@TRIGGERS.same("a time whose metric comes with the next validation is saved after it")
def _(side):
    fit = {**VALIDATING, "check_val_every_n_epoch": 2}
    return each(side, {"monitor": "val/score", "train_time_interval": timedelta(0), "save_top_k": 1}, **fit)


@TRIGGERS.same("the sanity check saves nothing")
def _(side):
    seen = []

    class Watching(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(side.saves[:])

    side.fit(side.callback(monitor="val/score"), Watching(), num_sanity_val_steps=2, **VALIDATING)
    return seen


@TRIGGERS.same("`fast_dev_run` saves nothing")
def _(side):
    side.fit(side.callback(), fast_dev_run=True)
    return side.saves


@TRIGGERS.same("`validate`, `test` and `predict` save nothing")
def _(side):
    callback = side.callback(save_last=True)
    trainer = side.fit(callback)
    before = side.saves[:]
    trainer.validate(Tiny(), verbose=False)
    trainer.test(Tiny(), verbose=False)
    return side.saves == before, side.seen(callback)


@TRIGGERS.same("`max_steps` within an epoch: the steps since the last trigger are not saved")
def _(side):
    return each(side, {"every_n_train_steps": 2}, {}, max_steps=5, max_epochs=-1, limit_train_batches=4)


@TRIGGERS.same("`accumulate_grad_batches`: a step is saved once")
def _(side):
    return each(side, {"every_n_train_steps": 1}, {}, accumulate_grad_batches=3, limit_train_batches=8, max_epochs=2)


@TRIGGERS.same("a DataLoader without a length")
def _(side):
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(torch.zeros(10, 2))

    return each(side, {"every_n_train_steps": 2}, {}, model=Tiny(loader=DataLoader(Endless())), limit_train_batches=3)


@TRIGGERS.same("`trainer.should_stop` within an epoch")
def _(side):
    class Stopping(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 3

    callback = side.callback(every_n_train_steps=2, save_top_k=-1, save_last=True)
    side.fit(callback, Stopping())
    return side.seen(callback)


@TRIGGERS.same("manual optimization: each step that the optimizers made")
def _(side):
    class Manual(Tiny):
        automatic_optimization = False

        def training_step(self, batch, number):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, number))
            optimizer.step()

    return each(side, {"every_n_train_steps": 1, "monitor": "score"}, {"every_n_epochs": 1}, model=Manual())


@TRIGGERS.different(
    "manual optimization: a batch that passes over a multiple of `every_n_train_steps`",
    lightning=[],
    here=[f"epoch={epoch}-step={step}.ckpt" for epoch, step in ((0, 3), (1, 5), (1, 7), (2, 11), (2, 9))],
)
def _(side):
    class Several(Tiny):
        """One step in the first batch, and two in each after it: none ends with an even number."""

        automatic_optimization = False

        def training_step(self, batch, number):
            loss = super().training_step(batch, number)
            for optimizer in self.optimizers()[: 1 if self.global_step == 0 else 2]:
                optimizer.step()
            return loss

        def configure_optimizers(self):
            return [torch.optim.SGD([each], lr=0.01) for each in self.parameters()]

    side.fit(side.callback(every_n_train_steps=2, save_top_k=-1), model=Several())
    return side.names()


@TRIGGERS.same("manual optimization with `saved_models`: the weights from before the step", since=(2, 6))
def _(side):
    class Manual(Tiny):
        automatic_optimization = False

        def training_step(self, batch, number):
            self.saved_models = {number: {key: value.clone() for key, value in self.layer.state_dict().items()}}
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, number))
            optimizer.step()

    return each(side, {"every_n_train_steps": 1}, model=Manual())
