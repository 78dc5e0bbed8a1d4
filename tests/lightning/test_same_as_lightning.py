"""A training by Lightning's ModelCheckpoint, and the same one by TieredModelCheckpoint: both leave the same.

Random trainings vary arguments, metrics, triggers and failures; stories tell what a random training does not reach.
docs/lightning.md lists the differences, which test_lightning_differences.py tests.
"""

import contextlib
import copy
import math
import pickle
import random
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, OnExceptionCheckpoint, model_checkpoint
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
    """Arguments of a callback."""
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
    """Options of a fit, and its model's class and arguments."""
    rare = [{}, {}, {"num_sanity_val_steps": 2}]
    # These are differences: a fast_dev_run beside a `last`, and a step that is due again before the next one is made.
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
    """The callback's state in a checkpoint."""
    state = side.state(name)
    best = {side.rel(path): number(score) for path, score in state["best_k_models"].items()}
    return number(state["current_score"]), best, side.rel(state["best_model_path"]), number(state["kth_value"])


def story_of(seed):
    """A training, or two with the same callback, of random arguments; some fail on the way."""

    def tell(side):
        chance = random.Random(seed)
        arguments = arguments_of(chance)
        # A step that is due at once again is saved once: a difference.
        fails = NEWEST and "train_time_interval" not in arguments and chance.random() < 0.3
        if fails:
            arguments["save_on_exception"] = chance.random() < 0.7
        told = []
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
                told.append((type(error).__name__, str(error)))
            # Of a training that stopped within an epoch, the epoch is another: a difference.
            files = {name: (step, weights) for name, (_, step, weights) in side.files().items()}
            # The state of the callback in the last checkpoint of all is a difference, too.
            if not arguments["save_last"] and not arguments["save_weights_only"]:
                files = {name: (*files[name], *state_in(side, name)) for name in files}
            told.append({**side.of_callback(callback), "files": files})
        # How often a state is written for `last` is a difference.
        return told, [] if arguments["save_last"] else side.saves

    return tell


def both(story, tmp_path, memory_dir):
    """What a story leaves on each side."""
    left = []
    for kind, folder in ((Side, "lightning"), (Ours, "ours")):
        # Lightning warns once a process.
        model_checkpoint.warning_cache.clear()
        left.append(story(kind(tmp_path / folder, memory_dir)))
    return left


def seeds():
    return [pytest.param(seed, marks=[pytest.mark.matrix] if seed >= 12 else []) for seed in range(120)]


@pytest.mark.parametrize("seed", seeds())
def test_a_random_training_leaves_the_same(seed, tmp_path, memory_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = both(story_of(seed), tmp_path, memory_dir)
    assert ours == theirs


# ------------------------------------------------------------------------------------------------ stories
STORIES = []


def story(told):
    STORIES.append(told)
    return told


@pytest.mark.parametrize("told", STORIES, ids=lambda told: told.__name__)
def test_a_story_leaves_the_same(told, tmp_path, memory_dir):
    theirs, ours = both(told, tmp_path, memory_dir)
    assert ours == theirs


def refused(call, *arguments, **named):
    """The error of a call."""
    with pytest.raises(Exception) as caught:
        call(*arguments, **named)
    return type(caught.value).__name__, str(caught.value).replace("Tiered", "")


@story
def names_of_a_callback(side):
    metrics = {"epoch": 3, "step": 4, "val/acc": torch.tensor(0.03)}
    without = side.callback(dirpath=None, filename="{epoch:03d}-{val/acc:.2f}")
    home = str(Path.home())
    return [
        without.format_checkpoint_name(dict(metrics)),
        without.format_checkpoint_name(dict(metrics), ver=3),
        without.format_checkpoint_name(dict(metrics), "other-{step}"),
        without.format_checkpoint_name({}),
        side.rel(side.callback().format_checkpoint_name(dict(metrics))),
        *(str(side.callback(dirpath=path("~/x")).dirpath).replace(home, "HOME") for path in (str, Path)),
        side.callback(monitor="a").state_key,
    ]


@story
def values_that_are_not_allowed(side):
    minute = timedelta(minutes=1)
    wrong = [
        {"save_top_k": -3},
        {"save_top_k": 3},
        {"mode": "auto"},
        {"every_n_train_steps": 1, "every_n_epochs": 2},
        {"train_time_interval": minute, "every_n_epochs": 2},
        {"train_time_interval": minute, "every_n_train_steps": 2},
        {"every_n_epochs": -3},
        {"every_n_train_steps": -3},
    ]
    return [refused(side.callback, **each) for each in wrong] + [
        refused(side.fit, side.callback(filename="a-{epoch}"), side.callback(filename="b-{epoch}")),
        refused(side.trainer, side.callback(), enable_checkpointing=False),
    ]


@story
def a_path_as_dirpath_with_one_below_it(side):
    below = Path(side.dirpath, "below")
    callbacks = [side.callback(dirpath=below), side.callback(dirpath=f"{below}/more/", every_n_epochs=2)]
    side.fit(*callbacks)
    return [side.seen(callback) for callback in callbacks]


@story
def two_callbacks_in_one_folder(side):
    low = side.callback(monitor="score", every_n_train_steps=1, filename="low-{step}", save_top_k=2)
    high = side.callback(monitor="score", every_n_train_steps=1, filename="high-{step}", mode="max", save_last=True)
    trainer = side.fit(low, high)
    both_known = trainer.checkpoint_callback is low, trainer.checkpoint_callbacks == [low, high]
    return both_known, side.seen(low), side.seen(high)


@story
def epoch_and_step_that_the_model_logs(side):
    class Logging(Tiny):
        def training_step(self, *arguments):
            self.log("epoch", 7.0)
            self.log("step", 100.0 + self.global_step)
            return super().training_step(*arguments)

    return side.train(save_top_k=-1, fit={"model": Logging()})


@story
def a_metric_that_is_never_logged(side):
    with pytest.warns(UserWarning, match="could not find the monitored key"):
        side.train(monitor="nothing")
    return side.names(), refused(side.train, monitor="nothing", fit={"limit_val_batches": 1})


@story
def top_k_as_yaml(side):
    callback = side.callback(monitor="score", save_top_k=2)
    side.fit(callback)
    callback.to_yaml()
    callback.to_yaml(str(side.root / "mine.yaml"))
    written = [Path(side.dirpath, "best_k_models.yaml"), side.root / "mine.yaml"]
    return [{side.rel(path): score for path, score in yaml.full_load(file.read_text()).items()} for file in written]


@story
def training_that_is_stopped(side):
    class Stopping(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 3

    callback = side.callback(every_n_train_steps=2, save_top_k=-1, save_last=True)
    side.fit(callback, Stopping())
    early = side.callback(monitor="val/score", save_top_k=2, dirpath=side.path("early"))
    side.fit(early, EarlyStopping("val/score", patience=1), model=Tiny((1, 2, 3, 4)), limit_val_batches=1, max_epochs=9)
    return side.seen(callback), side.of_callback(early)


@story
def evaluations_save_nothing(side):
    callback = side.callback(save_last=True)
    trainer = side.fit(callback)
    before = side.saves[:]
    trainer.validate(Tiny(), verbose=False)
    trainer.test(Tiny(), verbose=False)
    return side.saves == before, side.seen(callback)


@story
def manual_optimization_with_saved_models(side):
    if not NEWEST:
        pytest.skip("the rule for manual optimization came with Lightning 2.6")

    class Saving(Manual):
        def training_step(self, batch, number):
            self.saved_models = {number: {key: value.clone() for key, value in self.layer.state_dict().items()}}
            super().training_step(batch, number)

    return side.train(every_n_train_steps=1, save_top_k=-1, fit={"model": Saving()})


@story
def the_last_checkpoint_loads(side):
    callback = side.callback(save_last=True)
    side.fit(callback)
    loaded = Tiny.load_from_checkpoint(callback.last_model_path)
    return Path(side.path("last.ckpt")).is_file(), number(loaded.layer.weight.detach().sum())


@story
def last_as_a_link(side):
    # Each epoch is one of the best two.
    fit = {"model": Tiny((9, 3, 9, 2, 9, 1))}
    left = side.train(save_last="link", save_top_k=2, monitor="score", fit=fit)
    return left, side.train(save_last="link", save_top_k=0, every_n_train_steps=1, dirpath=side.path("two"))


@story
def a_second_fit_with_the_same_callback_has_its_own_last(side):
    callback = side.callback(monitor="score", every_n_train_steps=2, save_last=True, enable_version_counter=False)
    side.fit(callback, model=Tiny((9, 3, 9, 2)), max_epochs=2)
    other = Tiny((9, 8, 9, 7))
    other.layer.weight.data.fill_(7)
    # Step 4 is the best of the first fit; in the second it is only the last.
    side.fit(callback, model=other, max_epochs=2)
    return side.files()["last.ckpt"], side.of_callback(callback)["last"]


def best(_, callback):
    return callback.best_model_path


def second_step(side, _):
    return side.path("epoch=0-step=2.ckpt")


@story
def resume_from_the_best(side):
    return resume(side, newest(side), newest(side), best)


@story
def resume_from_an_older_one(side):
    return resume(side, newest(side), newest(side), second_step)


@story
def resume_in_the_middle_of_an_epoch(side):
    first = side.callback(every_n_train_steps=1, save_top_k=-1)
    second = side.callback(every_n_train_steps=1, save_top_k=-1, filename="again-{epoch}-{step}")
    return resume(side, first, second, second_step, to=7)


@story
def resume_from_the_last(side):
    def told(ckpt_path, folder):
        with_last = {"save_last": True, "enable_version_counter": False, "dirpath": side.path(folder)}
        first, second = newest(side, **with_last), newest(side, **with_last)
        step, left = resume(side, first, second, ckpt_path)
        return step, side.of_callback(second), left["files"][f"{folder}/last.ckpt"]

    return told(lambda _, callback: callback.last_model_path, "one"), told(lambda *_: "last", "two")


@story
def last_where_there_is_none(side):
    callback = newest(side)
    side.fit(callback, ckpt_path="last", max_steps=2)
    return side.seen(callback)


@story
def resume_from_an_exception_checkpoint(side):
    class Stopping(Tiny):
        def on_train_batch_end(self, *_):
            if self.global_step == 3:
                raise Trouble

    steps = []
    for model in (Stopping(), Tiny()):
        saves = newest(side, every_n_train_steps=2, save_last=True, enable_version_counter=False)
        model.on_train_start = lambda: steps.append(model.global_step)
        with pytest.raises(Trouble) if isinstance(model, Stopping) else contextlib.nullcontext():
            side.fit(saves, OnExceptionCheckpoint(side.dirpath), model=model, max_steps=5, max_epochs=-1)
    return steps


@story
def weights_continue_as_they_were(side):
    callback, other = newest(side), newest(side, dirpath=side.path("two"))
    side.fit(callback, max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side.fit(other, ckpt_path=best(side, callback), max_steps=4)
    straight = newest(side, dirpath=side.path("three"))
    side.fit(straight, max_steps=4)
    files = side.files()
    return files["two/epoch=1-step=4.ckpt"] == files["three/epoch=1-step=4.ckpt"], files


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


@story
def more_epochs_with_the_same_trainer(side):
    callback = side.callback(save_top_k=-1, save_last=True, enable_version_counter=False)
    trainer = side.fit(callback, max_epochs=2)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Tiny())
    return trainer.global_step, side.seen(callback)


@story
def checkpoints_that_no_fit_takes(side):
    with pytest.raises(FileNotFoundError):
        side.fit(newest(side), ckpt_path=side.path("nothing.ckpt"))
    return side.saves, refused(resume, side, newest(side, save_weights_only=True), newest(side), best)


@story
def an_exception_in_setup(side):
    error = refused(side.fit, side.callback(), Failing("setup", Trouble("trouble"), 0))
    return error, side.names()


#: Attributes of a callback that users read or set.
ATTRIBUTES_OF_USERS = """
    monitor verbose save_last save_top_k save_weights_only auto_insert_metric_name save_on_train_epoch_end
    enable_version_counter last_global_step_saved current_score best_k_models kth_best_model_path best_model_score
    last_model_path last_checkpoint_saved kth_value mode filename train_time_interval every_n_epochs every_n_train_steps
"""


def values(callback):
    return {key: str(value) for key, value in vars(callback).items() if key.lstrip("_") in ATTRIBUTES_OF_USERS.split()}


@story
def pickle_and_deepcopy(side):
    callback = side.callback(monitor="score", save_top_k=2)
    untrained = copy.deepcopy(callback)

    def copies_are_equal():
        return [
            values(each) == values(callback) for each in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback))
        ]

    found = [values(callback), copies_are_equal()]
    side.fit(callback)
    found.append(copies_are_equal())
    side.fit(untrained, max_epochs=2)
    return found, side.of_callback(untrained)


@story
def state_of_another_callback(side):
    one = side.callback(monitor="score", save_top_k=2, save_last=True)
    side.fit(one)
    same = side.callback(monitor="score", save_top_k=2)
    same.load_state_dict(one.state_dict())
    other = side.callback(monitor="score", save_top_k=2, dirpath=side.path("other"))
    with pytest.warns(UserWarning, match="dirpath has changed"):
        other.load_state_dict(one.state_dict())
    return side.of_callback(same), side.of_callback(other)


@story
def what_checkpoints_hold(side):
    class Named(Tiny):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    class Another(Callback):
        pass

    trainer = side.fit(side.callback(), Another(), model=Named())
    order = [type(each).__name__.replace("Tiered", "") for each in trainer.callbacks]
    trainer.save_checkpoint(side.path("weights.ckpt"), weights_only=True)
    trainer.strategy.teardown()
    states = side.load(*side.names())
    held = [(sorted(state), dict(state.get("hyper_parameters", {}))) for state in states]
    return order.index("Another") < order.index("ModelCheckpoint"), held


@story
def saved_by_hand(side):
    callback = side.callback(monitor="score")
    trainer = side.fit(callback)
    trainer.save_checkpoint(side.path("by/hand.ckpt"))
    trainer.save_checkpoint(side.root / "elsewhere" / "hand.ckpt")
    trainer.test(trainer.lightning_module, ckpt_path="best", verbose=False)
    tested = side.rel(trainer.ckpt_path)
    trainer.save_checkpoint(side.path("tested.ckpt"))
    trainer.strategy.teardown()
    return tested, side.files(), (side.root / "elsewhere" / "hand.ckpt").is_file()


@story
def said_of_the_top_k(side):
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("lightning.pytorch.callbacks.model_checkpoint.rank_zero_info", said.append)
        side.train(monitor="score", verbose=True, fit={"model": Tiny((5, 3, 4, 9, 2, 1))})
    return [text.replace(side.dirpath, "") for text in said]
