"""A training by Lightning's ModelCheckpoint, and the same one by TieredModelCheckpoint: both leave the same.

Random trainings vary arguments, metrics, triggers and failures; stories cover what a random training does not reach.
docs/lightning.md lists the differences, which test_lightning_differences.py tests.
"""

import math
import random
import warnings
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.callbacks import model_checkpoint
from support.as_lightning import INSTALLED, Failing, Ours, Side, Tiny, Trouble, newest, number, resume
from torch.utils.data import DataLoader, IterableDataset

NEWEST = INSTALLED >= (2, 6)


# ---------------------------------------------------------------------------------------- random trainings
class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(10, 2))


class Manual(Tiny):
    automatic_optimization = False

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        optimizer.step()


def fail_in(model, hook, error, steps):
    """Has a model raise in one hook, once this many steps are done."""
    before = getattr(model, hook)

    def fail(*arguments, **named):
        if model.global_step >= steps:
            raise error
        return before(*arguments, **named)

    setattr(model, hook, fail)


FILENAMES = (
    None,
    "x",
    "x-{epoch:02d}-{score:.2f}",
    "{epoch}-{unknown:.1f}",
    "{score:.0f}-{score_2:.0f}",
    "a/b/{epoch}-{step}",
    "{epoch}-{val/score:.1f}",
    "mAP@0.50 (ä, 検) 100%+#{epoch}&x=[1]",
)
ATTRIBUTES = (
    {"FILE_EXTENSION": ".pt"},
    {"CHECKPOINT_JOIN_CHAR": "@", "CHECKPOINT_EQUALS_CHAR": "_"},
    {"STARTING_VERSION": 9},
    {"CHECKPOINT_NAME_LAST": "{epoch}-{score:.0f}-last"},
)
SCORES = (0, 1, 2, 2, 3, 4, 5, 9, math.nan, math.inf, -math.inf)
CALLBACK_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_train_end",
    "on_fit_end",
)
MODEL_HOOKS = ("training_step", "backward", "optimizer_step", "validation_step", "on_validation_end", "on_train_end")


def arguments_of(chance):
    """Returns arguments of a callback."""
    monitor = chance.choice([None, None, "score", "val/score", "epoch", "step"])
    trigger = chance.choice(["every_n_epochs", "every_n_train_steps", "train_time_interval", None])
    found = {
        "monitor": monitor,
        "mode": chance.choice(["min", "max"]),
        "save_top_k": chance.choice([-1, 0, 1] if monitor is None else [-1, 0, 1, 2, 3]),
        "filename": chance.choice(FILENAMES),
        "auto_insert_metric_name": chance.random() < 0.7,
        "enable_version_counter": chance.random() < 0.7,
        "save_last": chance.choice([None, None, True]),
        "save_weights_only": chance.random() < 0.2,
        "save_on_train_epoch_end": chance.choice([None, None, True, False]),
        "attributes": chance.choice([None, None, *ATTRIBUTES]),
    }
    if trigger == "train_time_interval":
        # Always due, or never: both sides see other times.
        found[trigger] = chance.choice([timedelta(0), timedelta(hours=1)])
    elif trigger:
        found[trigger] = chance.choice([0, 1, 1, 2, 3])
    return found


def training_of(chance, arguments):
    """Returns options of a fit, and its model's class and arguments."""
    rare = [{}, {}, {"num_sanity_val_steps": 2}]
    # These are differences: a fast_dev_run with a `last`, and a step that is due again before the next one is made.
    rare += [] if arguments["save_last"] else [{"fast_dev_run": 2}]
    rare += [] if {"train_time_interval", "save_on_exception"} & arguments.keys() else [{"accumulate_grad_batches": 3}]
    fit = {
        "limit_train_batches": chance.choice([2, 3, 4]),
        "limit_val_batches": chance.choice([0, 1, 1]),
        **chance.choice(
            [{"max_epochs": chance.choice([1, 2, 3])}, {"max_steps": chance.choice([3, 5]), "max_epochs": -1}]
        ),
        **chance.choice([{}, {}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}]),
        **chance.choice(rare),
    }
    kind = chance.choice([Tiny, Tiny, Tiny, Manual])
    if kind is Manual:
        fit.pop("accumulate_grad_batches", None)
    is_endless = "val_check_interval" not in fit and chance.random() < 0.15
    values = tuple(chance.choice(SCORES) for _ in range(6))
    return fit, kind, {"values": values, "loader": DataLoader(Endless()) if is_endless else None}


def state_in(side, name):
    """Returns the callback's state in a checkpoint."""
    state = side.state(name)
    best = {side.rel(path): number(score) for path, score in state["best_k_models"].items()}
    return number(state["current_score"]), best, side.rel(state["best_model_path"]), number(state["kth_value"])


def story_of(seed):
    """Returns a training, or two with the same callback, of random arguments; some fail on the way."""

    def tell(side):
        chance = random.Random(seed)
        arguments = arguments_of(chance)
        # A step that is due at once again is saved once: a difference.
        fails = NEWEST and "train_time_interval" not in arguments and chance.random() < 0.3
        if fails:
            arguments["save_on_exception"] = chance.random() < 0.7
        states = []
        try:
            callback = side.callback(**arguments)
        except Exception as error:
            return type(error).__name__, str(error)
        # A second `last` is a difference; so is an exception before the first step of a second fit.
        for _ in range(1 if arguments["save_last"] or fails else chance.choice([1, 1, 2])):
            fit, kind, model = training_of(chance, arguments)
            model, others = kind(**model), []
            if fails:
                error = chance.choice([Trouble("trouble"), KeyboardInterrupt("stop"), SystemExit(3)])
                hook, steps = chance.choice([*CALLBACK_HOOKS, *MODEL_HOOKS]), chance.choice([0, 1, 3])
                others = [Failing(hook, error, steps)] if hook in CALLBACK_HOOKS else []
                if not others:
                    fail_in(model, hook, error, steps)
            try:
                side.fit(callback, *others, model=model, **fit)
            except BaseException as error:
                states.append((type(error).__name__, str(error)))
            # Of a training that stopped within an epoch, the epoch is another: a difference.
            files = {name: (step, weights) for name, (_, step, weights) in side.files().items()}
            # The state of the callback in the last checkpoint of all is a difference, too.
            if not arguments["save_last"] and not arguments["save_weights_only"]:
                files = {name: (*files[name], *state_in(side, name)) for name in files}
            states.append({**side.of_callback(callback), "files": files})
        # How often a state is written for `last` is a difference.
        return states, [] if arguments["save_last"] else side.saves

    return tell


def both(story, tmp_path, memory_dir):
    """Returns the results of a story on each side."""
    left = []
    for kind, folder in ((Side, "lightning"), (Ours, "ours")):
        # Lightning warns once a process.
        model_checkpoint.warning_cache.clear()
        left.append(story(kind(tmp_path / folder, memory_dir)))
    return left


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(each, marks=pytest.mark.matrix) for each in range(8, 100))])
def test_a_random_training_leaves_the_same(seed, tmp_path, memory_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = both(story_of(seed), tmp_path, memory_dir)
    assert ours == theirs


# ------------------------------------------------------------------------------------------------ stories
STORIES = []


def story(made):
    STORIES.append(made)
    return made


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_leaves_the_same(story, tmp_path, memory_dir):
    theirs, ours = both(story, tmp_path, memory_dir)
    assert ours == theirs


@story
def last_as_a_link(side):
    # Each epoch is one of the best two.
    fit = {"model": Tiny((9, 3, 9, 2, 9, 1))}
    left = side.train(save_last="link", save_top_k=2, monitor="score", fit=fit)
    return left, side.train(save_last="link", save_top_k=0, every_n_train_steps=1, dirpath=side.path("two"))


def best(_, callback):
    return callback.best_model_path


def second_step(side, _):
    return side.path("epoch=0-step=2.ckpt")


@story
def resume_in_the_middle_of_an_epoch(side):
    first = side.callback(every_n_train_steps=1, save_top_k=-1)
    second = side.callback(every_n_train_steps=1, save_top_k=-1, filename="again-{epoch}-{step}")
    return resume(side, first, second, second_step, to=7)


@story
def resume_from_the_last(side):
    def trained(ckpt_path, folder):
        with_last = {"save_last": True, "enable_version_counter": False, "dirpath": side.path(folder)}
        first, second = newest(side, **with_last), newest(side, **with_last)
        step, left = resume(side, first, second, ckpt_path)
        return step, side.of_callback(second), left["files"][f"{folder}/last.ckpt"]

    return trained(lambda _, callback: callback.last_model_path, "one"), trained(lambda *_: "last", "two")


@story
def the_one_that_a_run_resumed_from_stays(side):
    names = []
    for steps in (3, 6):
        path = side.path("epoch=0-step=3.ckpt") if steps > 3 else None
        side.fit(newest(side), ckpt_path=path, max_steps=steps, max_epochs=-1, limit_train_batches=9)
        names.append(side.names())
    return names


@story
def another_dirpath(side):
    with pytest.warns(UserWarning, match="dirpath has changed"):
        return resume(side, newest(side, save_last=True), newest(side, dirpath=side.path("new")), best)


@story
def nothing_more_to_train(side):
    callback = newest(side, save_last=True)
    side.fit(callback, max_steps=3)
    before = side.saves[:]
    for _ in range(2):
        trainer = side.fit(newest(side, save_last=True), ckpt_path=best(side, callback), max_steps=3)
        trainer.validate(Tiny(), ckpt_path=best(side, callback), verbose=False)
    return side.saves == before, side.names()
