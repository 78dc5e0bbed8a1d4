"""Names of checkpoints: what Lightning's ModelCheckpoint calls them, and TieredModelCheckpoint."""

from pathlib import Path

import pytest
import torch
from support.as_lightning import Tiny, Topic

NAMES = Topic("Names")


@pytest.mark.parametrize("case", NAMES.cases, ids=str)
def test_names(case, tmp_path, memory_dir):
    seen, expected = case.run(tmp_path, memory_dir)
    assert seen == expected


def test_the_document_has_each_case_and_the_reverse():
    assert NAMES.tested() == NAMES.documented()


@NAMES.same("the default, `{epoch}-{step}`")
def _(side):
    return side.train(save_top_k=-1)


@NAMES.same("metrics in `filename`, with a format")
def _(side):
    return side.train(save_top_k=-1, filename="x-{epoch:02d}-{score:.2f}")


@NAMES.same("a metric in `filename` that is not logged is 0")
def _(side):
    return side.train(filename="{epoch}-{unknown:.1f}")


@NAMES.same("a metric whose name begins another's")
def _(side):
    return side.train(filename="{score:.0f}-{score_2:.0f}")


@NAMES.same("`auto_insert_metric_name=False`")
def _(side):
    return side.train(filename="epoch {epoch}, score {score:.1f}", auto_insert_metric_name=False)


@NAMES.same("a slash in a metric's name makes a folder")
def _(side):
    return side.train(filename="{epoch}-{val/score:.1f}", save_top_k=-1, fit={"limit_val_batches": 1})


@NAMES.same("a slash in a metric's name, with `auto_insert_metric_name=False`")
def _(side):
    arguments = {"filename": "score={val/score:.1f}", "auto_insert_metric_name": False, "save_top_k": -1}
    return side.train(**arguments, fit={"limit_val_batches": 1})


@NAMES.same("a folder in `filename`")
def _(side):
    return side.train(filename="a/b/{epoch}", save_last=True)


@NAMES.same("dots, spaces, other letters and marks in `filename`")
def _(side):
    return side.train(filename="mAP@0.50 (ä, 検) 100%+#{epoch}&x=[1]")


@NAMES.same("`epoch` and `step` that the model logs are made whole numbers")
def _(side):
    class Logging(Tiny):
        def training_step(self, *arguments):
            self.log("epoch", 7.0)
            self.log("step", 100.0 + self.global_step)
            return super().training_step(*arguments)

    return side.train(save_top_k=-1, fit={"model": Logging()})


@NAMES.same("`FILE_EXTENSION` of a derived class")
def _(side):
    return side.train(attributes={"FILE_EXTENSION": ".pt"}, save_last=True)


@NAMES.same("`CHECKPOINT_JOIN_CHAR` and `CHECKPOINT_EQUALS_CHAR`")
def _(side):
    attributes = {"CHECKPOINT_JOIN_CHAR": "@", "CHECKPOINT_EQUALS_CHAR": "_"}
    return side.train(attributes=attributes, save_top_k=2, monitor="score", filename="x{epoch:d}")


@NAMES.same("a name that is taken gets `-v1`, `-v2`, ...")
def _(side):
    return side.train(monitor="score", save_top_k=3, filename="x", every_n_train_steps=1)


@NAMES.same("`STARTING_VERSION`")
def _(side):
    return side.train(attributes={"STARTING_VERSION": 9}, monitor="score", save_top_k=-1, filename="x")


@NAMES.same("`enable_version_counter=False` overwrites")
def _(side):
    return side.train(monitor="score", save_top_k=-1, filename="x", enable_version_counter=False)


@NAMES.same("one fixed name, no `monitor`: the file is overwritten, without `-v1`")
def _(side):
    return side.train(filename="model")


@NAMES.same("one fixed name, `save_top_k=1`: the file is overwritten, without `-v1`")
def _(side):
    return side.train(filename="model", monitor="score", mode="max", fit={"model": Tiny((1, 2, 3, 4, 5, 6))})


@NAMES.same("a second run with a new callback in the same folder gets `-v1`")
def _(side):
    first = side.train(monitor="epoch", save_top_k=-1, filename="{epoch}", fit={"max_epochs": 2})
    return first, side.train(monitor="epoch", save_top_k=-1, filename="{epoch}", fit={"max_epochs": 2})


@NAMES.same("a second fit with the same callback gets `-v1`")
def _(side):
    callback = side.callback(monitor="epoch", save_top_k=-1, filename="x")
    side.fit(callback, max_epochs=2)
    side.fit(callback, max_epochs=2)
    return side.seen(callback)


@NAMES.same("`format_checkpoint_name`, without a dirpath")
def _(side):
    callback = side.callback(dirpath=None, filename="{epoch:03d}-{val/acc:.2f}")
    metrics = {"epoch": 3, "val/acc": torch.tensor(0.03)}
    return [
        callback.format_checkpoint_name(dict(metrics)),
        callback.format_checkpoint_name(dict(metrics), ver=3),
        callback.format_checkpoint_name(dict(metrics), "other-{step}"),
        callback.format_checkpoint_name({}),
    ]


@NAMES.same("`format_checkpoint_name`, with a dirpath")
def _(side):
    return side.rel(side.callback().format_checkpoint_name({"epoch": 3, "step": 4}))


@NAMES.same("a dirpath as `Path`, with a slash at its end, and one below another")
def _(side):
    below = Path(side.dirpath, "below")
    callbacks = [side.callback(dirpath=below), side.callback(dirpath=f"{below}/more/", every_n_epochs=2)]
    side.fit(*callbacks)
    return [side.seen(callback) for callback in callbacks]


@NAMES.same("`~` in a dirpath")
def _(side):
    home = str(Path.home())
    return [str(side.callback(dirpath=path("~/x")).dirpath).replace(home, "HOME") for path in (str, Path)]


@NAMES.different("no dirpath", lightning="checkpoints", here="run")
def _(side):
    callback = side.callback(dirpath=None)
    side.fit(callback)
    return str(Path(callback.dirpath).relative_to(side.root))


@NAMES.different("a dirpath elsewhere", lightning="saved", here="ConfigError")
def _(side):
    try:
        side.fit(side.callback(dirpath=str(side.root / "elsewhere")))
    except Exception as error:
        return type(error).__name__
    return "saved"


@NAMES.different("names that leave dirpath, or are no name", lightning="saved", here="InvalidNameError")
def _(side):
    try:
        side.fit(side.callback(filename="../{epoch}"))
    except Exception as error:
        return type(error).__name__
    return "saved"
