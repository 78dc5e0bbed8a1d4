"""Differences from Lightning's ModelCheckpoint on purpose: each row of docs/lightning.md."""

import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.as_lightning import INSTALLED, Failing, Ours, Side, Tiny, Trouble, newest, resume

DOCUMENT = Path(__file__).parents[2] / "docs" / "lightning.md"


class Difference(NamedTuple):
    row: str
    story: Any
    lightning: Any
    here: Any
    since: tuple[int, int]


DIFFERENCES: list[Difference] = []


def different(row, *, lightning, here, since=(2, 4)):
    def add(story):
        DIFFERENCES.append(Difference(row, story, lightning, here, since))
        return story

    return add


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case.row)
def test_a_difference(case, tmp_path, memory_dir):
    if case.since > INSTALLED:
        pytest.skip(f"Lightning {case.since} brought it")
    assert case.story(Side(tmp_path / "lightning", memory_dir)) == case.lightning
    assert case.story(Ours(tmp_path / "ours", memory_dir)) == case.here


def test_the_document_has_each_difference_and_the_reverse():
    rows = re.findall(
        r"^\| (.+?) \| .+ \| .+ \|$",
        DOCUMENT.read_text().partition("## The differences")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    assert sorted(rows[1:]) == sorted(case.row for case in DIFFERENCES)


def outcome(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return "saved"


@different("no dirpath", lightning="checkpoints", here="run")
def _(side):
    callback = side.callback(dirpath=None)
    side.fit(callback)
    return str(Path(callback.dirpath).relative_to(side.root))


@different("a dirpath elsewhere", lightning="saved", here="ConfigError")
def _(side):
    return outcome(lambda: side.fit(side.callback(dirpath=str(side.root / "elsewhere"))))


@different("names that leave dirpath, or are no name", lightning="saved", here="ConfigError")
def _(side):
    return outcome(lambda: side.fit(side.callback(filename="../{epoch}")))


@different(
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


@different(
    "a second run with a new callback",
    lightning={"epoch=2-step=6.ckpt": 6, "epoch=1-step=4.ckpt": 4, "last.ckpt": 6, "last-v1.ckpt": 4},
    here={"epoch=2-step=6.ckpt": 6, "epoch=1-step=4.ckpt": 4, "last.ckpt": 4},
)
def _(side):
    side.train(save_last=True)
    side.train(save_last=True, fit={"max_epochs": 2})
    return {name: step for name, (_, step, _) in side.files().items()}


@different("`fast_dev_run` beside a `last` of earlier", since=(2, 6), lightning=["last-v1.ckpt"], here=[])
def _(side):
    side.train(save_last=True)
    before = side.files()
    side.fit(side.callback(save_last=True), fast_dev_run=True)
    after = side.files()
    return [name for name in after if after[name] != before.get(name)]


@different("how often the state is written for a step with `save_last`", lightning=(6, 3), here=(3, 3))
def _(side):
    side.train(save_last=True)
    saves = len(side.saves)
    side.train(save_last=False, dirpath=side.path("two"))
    return saves, len(side.saves) - saves


@different('`save_last="link"`: a file of its own', lightning=True, here=False)
def _(side):
    side.train(save_last="link")
    return os.path.exists(side.path("last.ckpt"))


@different("the `last_model_path` inside `last`", lightning="last.ckpt", here="")
def _(side):
    side.train(save_last=True, fit={"max_epochs": 1})
    return side.rel(side.state("last.ckpt")["last_model_path"])


@different('`save_last="link"`: is it a symbolic link?', lightning=True, here=False)
def _(side):
    side.train(save_last="link")
    return os.path.islink(side.path("last.ckpt"))


@different('`save_last="link"` and a step that is not in the top-k', lightning=1, here=3)
def _(side):
    fit = {"model": Tiny((1, 2, 3)), "max_steps": 3, "limit_train_batches": 3}
    left = side.train(save_last="link", monitor="score", every_n_train_steps=1, fit=fit)
    return left["files"]["last.ckpt"][1]


@different(
    "the checkpoint that was the last one, after a resume from `last`",
    lightning=["epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"],
    here=["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"],
)
def _(side):
    # Releases differ in the epoch that they count after such a resume.
    by_step = {"save_last": True, "enable_version_counter": False, "filename": "epoch=0-{step}"}
    resume(side, newest(side, **by_step), newest(side, **by_step), lambda *_: "last")
    return side.names()


@different(
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


@different("a resume from the end of a training that stopped within an epoch", lightning=[2, 2], here=[2, 4])
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


@different("a folder that is not empty", lightning="is not empty", here="")
def _(side):
    side.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        side.train()
    return next(("is not empty" for each in caught if "is not empty" in str(each.message)), "")


@different("in a `test` after the fit", lightning=["a.ckpt", "step=4.ckpt"], here=["a.ckpt"], since=(2, 6))
def _(side):
    callback = side.callback(filename="{step}", every_n_epochs=9, save_on_exception=True)
    trainer = side.fit(callback, max_steps=4, max_epochs=-1)
    trainer.save_checkpoint(side.path("a.ckpt"))
    trainer.callbacks.insert(0, Failing("on_test_batch_start", Trouble("trouble"), 0))
    with pytest.raises(Trouble):
        trainer.test(trainer.lightning_module, verbose=False)
    trainer.strategy.checkpoint_io.teardown()
    return side.names()


@different("keys of `state_dict` beyond Lightning's", lightning=[], here=["withheld"])
def _(side):
    callback = side.callback(monitor="score")
    side.fit(callback)
    known = "monitor best_model_score best_model_path current_score dirpath best_k_models"
    known += " kth_best_model_path kth_value last_model_path"
    state = callback.state_dict()
    assert set(known.split()) <= set(state)
    return sorted(set(state) - set(known.split()))


@different("`storage_options` of `trainer.save_checkpoint`", lightning="TypeError", here=["epoch=2-step=6.ckpt"])
def _(side):
    trainer = side.fit(side.callback())
    came = outcome(lambda: trainer.save_checkpoint(side.path("hand.ckpt"), storage_options={"tiers": ["memory"]}))
    trainer.strategy.teardown()
    return came if came != "saved" else side.names()


@different(
    "whether loggers hear of each file, and of the newest at the end", lightning=(True, True), here=(False, True)
)
def _(side):
    class Counting(CSVLogger):
        def after_save_checkpoint(self, callback):
            states.append(side.of_callback(callback))

    states = []
    callback = side.callback(save_last=True, save_top_k=-1)
    side.fit(callback, logger=Counting(str(side.root / "logs")))
    return len(states) == 6, states[-1] == side.of_callback(callback)


@different("a trainer without callbacks", lightning="checkpoints", here="run")
def _(side):
    trainer = side.fit()
    return str(trainer.checkpoint_callback.dirpath).removeprefix(f"{side.root}/")
