"""What an exception leaves: with Lightning's ModelCheckpoint, and with TieredModelCheckpoint."""

import pytest
from lightning.pytorch import Callback
from support.as_lightning import INSTALLED, Tiny, Topic, Trouble

EXCEPTIONS = Topic("Exceptions")
SINCE = (2, 6)


def test_the_document_has_each_case_and_the_reverse():
    assert EXCEPTIONS.tested() == EXCEPTIONS.documented()


class Failing(Callback):
    """Raises in one hook, once this many steps are done."""

    def __init__(self, hook, error, steps):
        def fail(trainer, *_, **__):
            if trainer.global_step >= steps and not trainer.sanity_checking:
                raise error

        setattr(self, hook, fail)


def failing_model(hook, steps=3):
    model = Tiny()

    def fail(*_):
        if model.global_step >= steps:
            raise Trouble("trouble")

    setattr(model, hook, fail)
    return model


def left(side, *, hook=None, model=None, error=None, steps=3, fit=None, **arguments):
    """What a training leaves that fails; in an epoch of four steps."""
    callback = side.callback(**{"filename": "{step}", "every_n_epochs": 9, **arguments})
    others = [Failing(hook, error or Trouble("trouble"), steps)] if hook else []
    fit = {"limit_train_batches": 4, "max_epochs": 2, "limit_val_batches": 1, **(fit or {})}
    try:
        side.fit(callback, *others, model=model, **fit)
    except BaseException as caught:
        return type(caught).__name__, str(caught), side.seen(callback)
    raise AssertionError("nothing failed")


def on_exception():
    return {"save_on_exception": True} if INSTALLED >= SINCE else {}


@EXCEPTIONS.same("without `save_on_exception`: nothing is saved, what was saved stays")
def _(side):
    return left(side, hook="on_train_batch_start"), left(
        side, hook="on_train_batch_start", every_n_train_steps=2, every_n_epochs=None, dirpath=side.path("two")
    )


CALLBACK_HOOKS = (
    "on_train_batch_end",
    "on_fit_end",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_train_end",
)
MODEL_HOOKS = ("training_step", "backward", "optimizer_step", "validation_step", "on_validation_end", "on_train_end")


def in_callbacks(hook):
    @EXCEPTIONS.same(f"in `{hook}` of another callback", since=SINCE)
    def _(side):
        return left(side, hook=hook, **on_exception())


def in_models(hook):
    @EXCEPTIONS.same(f"in `{hook}` of the model", since=SINCE)
    def _(side):
        return left(side, model=failing_model(hook), **on_exception())


for name in CALLBACK_HOOKS:
    in_callbacks(name)
for name in MODEL_HOOKS:
    in_models(name)


@EXCEPTIONS.same("`save_on_exception` with `save_last` and `monitor`", since=SINCE)
def _(side):
    return left(side, hook="on_train_batch_start", save_last=True, monitor="score", **on_exception())


@EXCEPTIONS.same("`KeyboardInterrupt`", since=SINCE)
def _(side):
    return left(side, hook="on_train_batch_start", error=KeyboardInterrupt("stop"), **on_exception())


@EXCEPTIONS.same("`SystemExit`", since=SINCE)
def _(side):
    return left(side, hook="on_train_batch_start", error=SystemExit(3), **on_exception())


@EXCEPTIONS.same("a step that is saved already is not saved again", since=SINCE)
def _(side):
    arguments = {"every_n_train_steps": 1, "every_n_epochs": None, "save_top_k": -1}
    return left(side, hook="on_train_batch_start", **arguments, **on_exception()), side.saves


@EXCEPTIONS.same("before the first step", since=SINCE)
def _(side):
    return left(side, hook="on_train_start", steps=0, **on_exception())


@EXCEPTIONS.same("in the sanity check", since=SINCE)
def _(side):
    model = failing_model("validation_step", steps=0)
    return left(side, model=model, fit={"num_sanity_val_steps": 1}, **on_exception())


@EXCEPTIONS.same("in a `fast_dev_run`", since=SINCE)
def _(side):
    return left(side, hook="on_train_batch_start", steps=1, fit={"fast_dev_run": 3}, **on_exception())


@EXCEPTIONS.different("in a `test` after the fit", lightning=["a.ckpt", "step=4.ckpt"], here=["a.ckpt"], since=SINCE)
def _(side):
    callback = side.callback(filename="{step}", every_n_epochs=9, **on_exception())
    trainer = side.fit(callback, max_steps=4, max_epochs=-1)
    trainer.save_checkpoint(side.path("a.ckpt"))
    trainer.callbacks.insert(0, Failing("on_test_batch_start", Trouble("trouble"), 0))
    with pytest.raises(Trouble):
        trainer.test(trainer.lightning_module, verbose=False)
    trainer.strategy.checkpoint_io.teardown()
    return side.names()


@EXCEPTIONS.same("in another callback's `setup`")
def _(side):
    name, said, seen = left(side, hook="setup", steps=0)
    return name, said, seen["files"]


@EXCEPTIONS.same("a fit with the same callback after one that failed")
def _(side):
    callback = side.callback(every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(Trouble):
        side.fit(callback, Failing("on_train_batch_start", Trouble("trouble"), 3))
    side.fit(callback, max_epochs=2)
    return side.seen(callback)


def cases():
    """All; the hooks beyond the first of each kind are further cases."""
    further = {f"in `{hook}` of another callback" for hook in CALLBACK_HOOKS[2:]}
    further |= {f"in `{hook}` of the model" for hook in MODEL_HOOKS[1:]}
    return [
        pytest.param(case, id=case.row, marks=[pytest.mark.matrix] if case.row in further else [])
        for case in EXCEPTIONS.cases
    ]


@pytest.mark.parametrize("case", cases())
def test_exceptions(case, tmp_path, memory_dir):
    seen, expected = case.run(tmp_path, memory_dir)
    assert seen == expected
