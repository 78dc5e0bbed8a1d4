"""Several checkpoint callbacks below one dirpath: those that would save to one name are refused, others work."""

import os

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import Model

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError


def test_one_to_resume_from_and_one_for_the_best(runs):
    """Both work beside Lightning's own in a folder of its own, and resume with their state."""

    def three():
        return (
            TieredModelCheckpoint(memory_every_n_train_steps=2, s3_every_n_train_steps=10, save_last=True),
            TieredModelCheckpoint(monitor="score", mode="max", save_top_k=3, filename="best-{step}", every_n_epochs=1),
            ModelCheckpoint(f"{os.path.realpath(runs.dirpath)}/own/", every_n_train_steps=20, save_last=True),
        )

    first = three()
    runs.fit(*first, max_steps=-1, max_epochs=2)
    expected = ["best-step=20.ckpt", "best-step=40.ckpt", "epoch=1-step=40.ckpt", "last.ckpt"]
    assert runs.durable() == sorted([*expected, "own/epoch=1-step=40.ckpt", "own/last.ckpt"])
    assert type(first[2]) is TieredModelCheckpoint
    assert first[2].best_model_path == f"{runs.dirpath}/own/epoch=1-step=40.ckpt"
    second = three()
    trainer, _ = runs.fit(*second, max_steps=-1, max_epochs=3)
    assert trainer.global_step == 60
    assert len(second[1].best_k_models) == 3
    assert "epoch=1-step=40.ckpt" not in runs.durable()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: (tiered(s3_every_n_train_steps=5), tiered(every_n_epochs=1)), "{epoch}-{step}.ckpt"),
        (lambda: (tiered(s3_every_n_train_steps=5), ModelCheckpoint()), "{epoch}-{step}.ckpt"),
        (
            lambda: (tiered(filename="{epoch}-{step}"), tiered(monitor="score", enable_version_counter=False)),
            "{epoch}-{step}.ckpt",
        ),
        (lambda: (tiered(save_last=True), tiered(monitor="score", filename="b", save_last=True)), "last.ckpt"),
    ],
)
def test_two_that_save_to_one_name_are_refused(make, name, runs):
    one, other = make()
    with pytest.raises(ConfigError, match=r"\(.*every_n.* and .*\) both save to .* — ") as caught:
        runs.fit(one, other)
    assert f"both save to {runs.dirpath}/{name} " in str(caught.value)
    assert runs.durable() == []


class Own(ModelCheckpoint):
    """Of a user's, who may have overridden anything."""


@pytest.mark.parametrize(("make", "warns"), [(lambda _: Own(), True), (lambda dirpath: Own(f"{dirpath}/own"), False)])
def test_a_derived_class_that_saves_elsewhere_is_told_of(make, warns, runs, caplog):
    """A restart would begin from scratch."""
    with caplog.at_level("WARNING", "tiered_checkpoint_io"):
        runs.fit(make(runs.dirpath))
    said = [each.getMessage() for each in caplog.records if "in neither tier" in each.getMessage()]
    assert len(said) == warns
    assert not warns or said[0].startswith(f"Own saves to {runs.root}/checkpoints, which is not below {runs.dirpath}: ")
    assert bool(runs.durable()) is not warns


def tiered(**arguments):
    return TieredModelCheckpoint(**arguments)


@pytest.mark.parametrize("given", [[], [ModelCheckpoint(monitor="score")]], ids=["none", "stock"])
def test_lightnings_own_callback_saves_below_the_io_where_a_test_came_first(given, runs):
    trainer = runs.trainer(list(given), max_steps=3)
    trainer.test(Model(), verbose=False)
    trainer.fit(Model())
    assert [name.endswith(".ckpt") for name in runs.durable()] == [True]
