"""The last checkpoint: of Lightning's ModelCheckpoint, and of TieredModelCheckpoint."""

import os

import pytest
from support.as_lightning import Tiny, Topic, number

LAST = Topic("The last checkpoint")


@pytest.mark.parametrize("case", LAST.cases, ids=str)
def test_last(case, tmp_path, memory_dir):
    seen, expected = case.run(tmp_path, memory_dir)
    assert seen == expected


def test_the_document_has_each_case_and_the_reverse():
    assert LAST.tested() == LAST.documented()


@LAST.same("`save_last=True`: `last` holds what was saved last")
def _(side):
    return side.train(save_last=True), side.train(save_last=True, monitor="score", dirpath=side.path("two"))


@LAST.same("no `save_last`: no `last`")
def _(side):
    return side.train(save_last=False), side.train(dirpath=side.path("two"))


@LAST.same("an epoch that is not in the top-k")
def _(side):
    return side.train(save_last=True, monitor="score", fit={"model": Tiny((0, 1, 0, 2, 0, 3))})


@LAST.same("a step that is not in the top-k is `last` all the same")
def _(side):
    fit = {"model": Tiny((1, 2, 3, 4)), "max_steps": 4}
    return side.train(save_last=True, monitor="score", every_n_train_steps=1, fit=fit)


@LAST.same("`CHECKPOINT_NAME_LAST` with metrics: the one before is deleted")
def _(side):
    attributes = {"CHECKPOINT_NAME_LAST": "{epoch}-{score:.0f}-last"}
    return side.train(attributes=attributes, save_last=True, save_top_k=-1)


@LAST.same("`save_last` with `enable_version_counter=False`, and a second run")
def _(side):
    arguments = {"save_last": True, "enable_version_counter": False}
    return side.train(**arguments), side.train(**arguments, fit={"max_epochs": 2})


@LAST.same("`save_last` with `save_weights_only`")
def _(side):
    callback = side.callback(save_last=True, save_weights_only=True)
    side.fit(callback)
    return side.files(), [sorted(state) for state in side.load(*side.names())]


@LAST.same("nothing else was saved: `last` is saved as training ends")
def _(side):
    return side.train(save_last=True, every_n_epochs=10), side.train(
        save_last=True, save_on_train_epoch_end=False, dirpath=side.path("two")
    )


@LAST.same("a second fit with the same callback: `last` is of the second")
def _(side):
    callback = side.callback(monitor="score", every_n_train_steps=2, save_last=True, enable_version_counter=False)
    side.fit(callback, model=Tiny((9, 3, 9, 2)), max_epochs=2)
    other = Tiny((9, 8, 9, 7))
    other.layer.weight.data.fill_(7)
    # Step 4 is the best of the first fit; in the second it is only the last.
    side.fit(callback, model=other, max_epochs=2)
    return side.files()["last.ckpt"], side.of_callback(callback)["last"]


@LAST.different(
    "a second run with a new callback",
    lightning={"epoch=2-step=6.ckpt": 6, "epoch=1-step=4.ckpt": 4, "last.ckpt": 6, "last-v1.ckpt": 4},
    here={"epoch=2-step=6.ckpt": 6, "epoch=1-step=4.ckpt": 4, "last.ckpt": 4},
)
def _(side):
    side.train(save_last=True)
    side.train(save_last=True, fit={"max_epochs": 2})
    return {name: step for name, (_, step, _) in side.files().items()}


@LAST.different("`fast_dev_run` beside a `last` of earlier", since=(2, 6), lightning=["last-v1.ckpt"], here=[])
def _(side):
    side.train(save_last=True)
    before = side.files()
    side.fit(side.callback(save_last=True), fast_dev_run=True)
    after = side.files()
    return [name for name in after if after[name] != before.get(name)]


@LAST.different("how often the state is written for a step with `save_last`", lightning=(6, 3), here=(3, 3))
def _(side):
    side.train(save_last=True)
    saves = len(side.saves)
    side.train(save_last=False, dirpath=side.path("two"))
    return saves, len(side.saves) - saves


@LAST.same("a file of its own")
def _(side):
    side.train(save_last=True)
    return os.path.exists(side.path("last.ckpt"))


@LAST.same("`load_from_checkpoint(callback.last_model_path)` right after `fit`")
def _(side):
    callback = side.callback(save_last=True)
    side.fit(callback)
    return number(Tiny.load_from_checkpoint(callback.last_model_path).layer.weight.detach().sum())


@LAST.different('`save_last="link"`: a file of its own', lightning=True, here=False)
def _(side):
    side.train(save_last="link")
    return os.path.exists(side.path("last.ckpt"))


@LAST.different("the `last_model_path` inside `last`", lightning="last.ckpt", here="")
def _(side):
    side.train(save_last=True, fit={"max_epochs": 1})
    return side.rel(side.state("last.ckpt")["last_model_path"])


@LAST.same('`save_last="link"`: names, and what they hold')
def _(side):
    # Each epoch is one of the best two.
    return side.train(save_last="link", save_top_k=2, monitor="score", fit={"model": Tiny((9, 3, 9, 2, 9, 1))})


@LAST.same('`save_last="link"` with `save_top_k=0`')
def _(side):
    return side.train(save_last="link", save_top_k=0, every_n_train_steps=1)


@LAST.different('`save_last="link"`: is it a symbolic link?', lightning=True, here=False)
def _(side):
    side.train(save_last="link")
    return os.path.islink(side.path("last.ckpt"))


@LAST.different('`save_last="link"` and a step that is not in the top-k', lightning=1, here=3)
def _(side):
    fit = {"model": Tiny((1, 2, 3)), "max_steps": 3, "limit_train_batches": 3}
    left = side.train(save_last="link", monitor="score", every_n_train_steps=1, fit=fit)
    return left["files"]["last.ckpt"][1]
