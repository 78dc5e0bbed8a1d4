"""Resuming and starting again: with Lightning's ModelCheckpoint, and with TieredModelCheckpoint."""

import contextlib
import warnings

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from support.as_lightning import Tiny, Topic, Trouble, number

RESUME = Topic("Resuming and starting again")


@pytest.mark.parametrize("case", RESUME.cases, ids=str)
def test_resume(case, tmp_path, memory_dir):
    seen, expected = case.run(tmp_path, memory_dir)
    assert seen == expected


def test_the_document_has_each_case_and_the_reverse():
    assert RESUME.tested() == RESUME.documented()


def newest(side, **more):
    return side.callback(**{"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 1, **more})


def resume(side, first, second, ckpt_path, *, to=5, **fit):
    """Three steps by one callback, and up to five by another that resumes."""
    side.fit(first, max_steps=3, max_epochs=-1, limit_train_batches=4)
    fit = {"max_steps": to, "max_epochs": -1, "limit_train_batches": 4, **fit}
    trainer = side.fit(second, ckpt_path=ckpt_path(side, first), **fit)
    return trainer.global_step, side.seen(second)


def best(side, callback):
    return callback.best_model_path


@RESUME.same("`ckpt_path=callback.best_model_path`: steps, scores and top-k are taken up")
def _(side):
    return resume(side, newest(side), newest(side), best)


@RESUME.same("an older checkpoint")
def _(side):
    return resume(side, newest(side), newest(side), lambda side, _: side.path("epoch=0-step=2.ckpt"))


#: Of the callbacks that resume from their last checkpoint.
WITH_LAST = {"save_last": True, "enable_version_counter": False}


@RESUME.same("`ckpt_path=callback.last_model_path`")
def _(side):
    first, second = newest(side, **WITH_LAST), newest(side, **WITH_LAST)
    step, left = resume(side, first, second, lambda _, callback: callback.last_model_path)
    return step, side.of_callback(second), left["files"]["last.ckpt"]


@RESUME.same('`ckpt_path="last"` with a new trainer and callback')
def _(side):
    first, second = newest(side, **WITH_LAST), newest(side, **WITH_LAST)
    step, left = resume(side, first, second, lambda *_: "last")
    return step, side.of_callback(second), left["files"]["last.ckpt"]


@RESUME.different(
    "the checkpoint that was the last one, after a resume from `last`",
    lightning=["epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"],
    here=["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"],
)
def _(side):
    # Releases differ in the epoch that they count after such a resume.
    by_step = {**WITH_LAST, "filename": "epoch=0-{step}"}
    resume(side, newest(side, **by_step), newest(side, **by_step), lambda *_: "last")
    return side.names()


@RESUME.same("without `ckpt_path`, beside an `OnExceptionCheckpoint`: from what that saved")
def _(side):
    class Stopping(Tiny):
        def on_train_batch_end(self, *_):
            if self.global_step == 3:
                raise Trouble

    steps = []
    for model in (Stopping(), Tiny()):
        callbacks = newest(side, every_n_train_steps=2, **WITH_LAST), OnExceptionCheckpoint(side.dirpath)
        model.on_train_start = lambda: steps.append(model.global_step)
        with pytest.raises(Trouble) if isinstance(model, Stopping) else contextlib.nullcontext():
            side.fit(*callbacks, model=model, max_steps=5, max_epochs=-1)
    return steps


@RESUME.same('`ckpt_path="last"` where there is none: from scratch')
def _(side):
    callback = newest(side)
    side.fit(callback, ckpt_path="last", max_steps=2)
    return side.seen(callback)


@RESUME.same("training continues from the weights as they were")
def _(side):
    callback, other = newest(side), newest(side, dirpath=side.path("two"))
    side.fit(callback, max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side.fit(other, ckpt_path=best(side, callback), max_steps=4)
    straight = newest(side, dirpath=side.path("three"))
    side.fit(straight, max_steps=4)
    files = side.files()
    return files["two/epoch=1-step=4.ckpt"] == files["three/epoch=1-step=4.ckpt"], files


@RESUME.same("the checkpoint that a run resumed from is not deleted by that run")
def _(side):
    names = []
    for steps in (3, 6):
        callback = newest(side)
        path = side.path("epoch=0-step=3.ckpt") if steps > 3 else None
        side.fit(callback, ckpt_path=path, max_steps=steps, max_epochs=-1, limit_train_batches=9)
        names.append(side.names())
    return names


@RESUME.different(
    "the checkpoint that a run resumed from, when the run after that one trains",
    lightning=["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt"],
    here=["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt"],
)
def _(side):
    for steps in (2, 4, 6):
        callback = newest(side, save_top_k=1, every_n_train_steps=2)
        path = side.path(f"epoch=0-step={steps - 2}.ckpt") if steps > 2 else None
        side.fit(callback, ckpt_path=path, max_steps=steps, max_epochs=-1, limit_train_batches=9)
    return side.names()


@RESUME.same("another dirpath: a warning, and nothing is deleted in the old one")
def _(side):
    with pytest.warns(UserWarning, match="dirpath has changed"):
        return resume(side, newest(side, save_last=True), newest(side, dirpath=side.path("new")), best)


@RESUME.same("a fit that has nothing more to train saves nothing")
def _(side):
    callback = newest(side, save_last=True)
    side.fit(callback, max_steps=3)
    before = side.saves[:]
    for _ in range(2):
        trainer = side.fit(newest(side, save_last=True), ckpt_path=best(side, callback), max_steps=3)
        trainer.validate(Tiny(), ckpt_path=best(side, callback), verbose=False)
    return side.saves == before, side.names()


@RESUME.same("`fit` again with the same trainer and more epochs")
def _(side):
    callback = side.callback(save_top_k=-1, save_last=True, enable_version_counter=False)
    trainer = side.fit(callback, max_epochs=2)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Tiny())
    return trainer.global_step, side.seen(callback)


@RESUME.same("a resume in the middle of an epoch")
def _(side):
    first = side.callback(every_n_train_steps=1, save_top_k=-1)
    second = side.callback(every_n_train_steps=1, save_top_k=-1, filename="again-{epoch}-{step}")
    return resume(side, first, second, lambda side, _: side.path("epoch=0-step=2.ckpt"), to=7)


@RESUME.different(
    "`accumulate_grad_batches`: the step that a run resumed from, at the batch after it",
    lightning=5,
    here=4,
    since=(2, 6),
)
def _(side):
    for steps in (2, 3):
        callback = side.callback(every_n_train_steps=1, save_top_k=-1)
        path = side.path("epoch=0-step=2.ckpt") if steps > 2 else None
        side.fit(callback, ckpt_path=path, max_steps=steps, accumulate_grad_batches=2, limit_train_batches=8)
    # How many batches a run that resumes from there passes by; two of them made each step.
    return side.load("epoch=0-step=2.ckpt")[0]["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]


@RESUME.different("a resume from the end of a training that stopped within an epoch", lightning=[2, 2], here=[2, 4])
def _(side):
    class Stopping(Tiny):
        def on_train_batch_end(self, *_):
            self.trainer.should_stop |= self.global_step == 2

    steps = []
    for model in (Stopping(), Tiny()):
        callback = side.callback(every_n_epochs=1, save_top_k=-1)
        path = None if isinstance(model, Stopping) else side.path("epoch=0-step=2.ckpt")
        trainer = side.fit(callback, model=model, ckpt_path=path, max_epochs=1, limit_train_batches=4)
        steps.append(trainer.global_step)
    return steps


class Watching(Tiny):
    """Notes the weights that it is tested with."""

    def on_test_start(self):
        self.tested = number(self.layer.weight.sum())

    def tested_with(self, side):
        return [name for name, (_, _, weights) in side.files().items() if weights == self.tested]


@RESUME.same('`test(ckpt_path="best")` after a fit')
def _(side):
    model = Watching()
    callback = side.callback(monitor="score", every_n_train_steps=1, save_top_k=-1)
    trainer = side.fit(callback, model=model)
    trainer.test(model, ckpt_path="best", verbose=False)
    return side.rel(trainer.ckpt_path), model.tested_with(side)


@RESUME.different(
    '`ckpt_path="best"` in a process that has not trained', lightning="ValueError", here=["epoch=0-step=2.ckpt"]
)
def _(side):
    first = side.callback(monitor="score", every_n_train_steps=1, save_top_k=-1)
    side.fit(first, model=Tiny((3, 1, 2)), max_steps=3)
    model = Watching()
    try:
        side.trainer(side.callback(monitor="score")).test(model, ckpt_path="best", verbose=False)
    except ValueError as error:
        return type(error).__name__
    return model.tested_with(side)


@RESUME.same("a fit from weights alone is refused")
def _(side):
    with pytest.raises(Exception) as caught:
        resume(side, newest(side, save_weights_only=True), newest(side), best)
    return type(caught.value).__name__, str(caught.value)


@RESUME.same("a `ckpt_path` that does not exist")
def _(side):
    with pytest.raises(Exception) as caught:
        side.fit(newest(side), ckpt_path=side.path("nothing.ckpt"))
    return isinstance(caught.value, FileNotFoundError), side.saves


@RESUME.different("a folder that is not empty", lightning="is not empty", here="")
def _(side):
    side.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        side.train()
    return next(("is not empty" for each in caught if "is not empty" in str(each.message)), "")
