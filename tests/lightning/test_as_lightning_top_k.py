"""Which checkpoints are kept: by Lightning's ModelCheckpoint, and by TieredModelCheckpoint."""

import math
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping, model_checkpoint
from support.as_lightning import Tiny, Topic

TOP_K = Topic("Top-k")
NAN = math.nan


@pytest.mark.parametrize("case", TOP_K.cases, ids=str)
def test_top_k(case, tmp_path, memory_dir):
    seen, expected = case.run(tmp_path, memory_dir)
    assert seen == expected


def test_the_document_has_each_case_and_the_reverse():
    assert TOP_K.tested() == TOP_K.documented()


def train(side, *values, **arguments):
    """A checkpoint each step, with these scores."""
    fit = {"model": Tiny(values), "max_steps": len(values), "max_epochs": 99}
    return side.train(**{"monitor": "score", "every_n_train_steps": 1, **arguments}, fit=fit)


@TOP_K.same("no `monitor`, `save_top_k=1`: the newest")
def _(side):
    return side.train()


@TOP_K.same("no `monitor`, `save_top_k=-1`: all")
def _(side):
    return side.train(save_top_k=-1)


@TOP_K.same("`save_top_k=0`: none")
def _(side):
    return side.train(save_top_k=0)


@TOP_K.same("`save_top_k=0` with `save_last`: the last alone")
def _(side):
    return side.train(save_top_k=0, save_last=True, every_n_train_steps=1)


@TOP_K.same('`mode="min"`')
def _(side):
    return train(side, 5, 3, 4, 1, 2, save_top_k=2)


@TOP_K.same('`mode="max"`')
def _(side):
    return train(side, 5, 3, 4, 1, 6, save_top_k=2, mode="max")


@TOP_K.same("`save_top_k=-1` with `monitor`: all, and the best and worst of them")
def _(side):
    return train(side, 5, 3, 4, 1, 2, save_top_k=-1)


@TOP_K.same("equal scores: the older stays")
def _(side):
    return train(side, 2, 2, 2, 3, 2, save_top_k=2)


@TOP_K.same("NaN as the first score")
def _(side):
    return train(side, NAN, 3, 2), train(side, NAN, 3, 4, mode="max")


@TOP_K.same("NaN as a later score")
def _(side):
    return train(side, 3, NAN, NAN, 2, save_top_k=2), train(side, 3, NAN, 4, mode="max", save_top_k=2)


@TOP_K.same("infinite scores")
def _(side):
    return train(side, math.inf, -math.inf, 1, save_top_k=2)


@TOP_K.same("`current_score` is the newest saved, also inside the checkpoints")
def _(side):
    left = train(side, 3, 2, 1, save_top_k=3)
    return left, [float(side.state(name)["current_score"]) for name in side.names()]


@TOP_K.same("the state inside the checkpoints names what was best and k-th then")
def _(side):
    train(side, 3, 1, 2, save_top_k=-1)
    keys = ("best_model_path", "kth_best_model_path", "last_model_path")
    return {name: [side.rel(side.state(name)[key]) for key in keys] for name in side.names()}


@TOP_K.same('`monitor="epoch"` and `monitor="step"`')
def _(side):
    by_epoch = side.callback(monitor="epoch", mode="max", save_top_k=2, filename="e-{epoch}")
    by_step = side.callback(monitor="step", mode="max", save_top_k=2, filename="s-{step}")
    side.fit(by_epoch, by_step)
    return side.seen(by_epoch), side.seen(by_step)


@TOP_K.same("a monitored metric that is never logged: a warning, and no checkpoint")
def _(side):
    # Lightning says it once a process.
    model_checkpoint.warning_cache.clear()
    with pytest.warns(UserWarning, match="could not find the monitored key"):
        return side.train(monitor="nothing")


@TOP_K.same("a monitored metric that is missing after a validation: `MisconfigurationException`")
def _(side):
    with pytest.raises(Exception) as caught:
        side.train(monitor="nothing", fit={"limit_val_batches": 1})
    return type(caught.value).__name__, str(caught.value)


@TOP_K.same("values that `save_top_k`, `monitor` and `mode` do not allow")
def _(side):
    said = []
    for arguments in ({"save_top_k": -3}, {"save_top_k": 3}, {"mode": "auto"}):
        with pytest.raises(Exception) as caught:
            side.callback(**arguments)
        said.append((type(caught.value).__name__, str(caught.value)))
    return said


@TOP_K.same("`to_yaml`")
def _(side):
    callback = side.callback(monitor="score", save_top_k=2)
    side.fit(callback)
    callback.to_yaml()
    callback.to_yaml(str(side.root / "mine.yaml"))
    written = [Path(side.dirpath, "best_k_models.yaml"), side.root / "mine.yaml"]
    return [{side.rel(path): score for path, score in yaml.full_load(file.read_text()).items()} for file in written]


@TOP_K.same("`EarlyStopping` beside it")
def _(side):
    callback = side.callback(monitor="val/score", save_top_k=2)
    stopping = EarlyStopping("val/score", patience=1)
    side.fit(callback, stopping, model=Tiny((1, 2, 3, 4)), limit_val_batches=1, max_epochs=9)
    return side.seen(callback)


@TOP_K.same("two callbacks in one folder, each with its own top-k")
def _(side):
    low = side.callback(monitor="score", every_n_train_steps=1, filename="low-{step}", save_top_k=2)
    high = side.callback(monitor="score", every_n_train_steps=1, filename="high-{step}", mode="max", save_last=True)
    side.fit(low, high)
    return side.seen(low), side.seen(high)
