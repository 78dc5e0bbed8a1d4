"""Captures that overlap training: what is saved is the state at the moment of the save, whatever trains and how."""

import copy
import functools
import os
import random
import threading

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.save.full import FullSaver
from tiered_checkpoint_io.engine.save.overlap import Overlap
from tiered_checkpoint_io.engine.save.part import PartSave
from tiered_checkpoint_io.engine.staging.background import BackgroundTask

OPTIMIZERS = {
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "LBFGS": functools.partial(torch.optim.LBFGS, lr=0.01, max_iter=3),
}
#: How long a capture is put off, if nothing waits for it: longer than a batch takes.
LATE_S = 0.5


class Normed(LightningModule):
    """Each batch depends on the number of batches alone: Lightning does not wind a plain loader forward."""

    def __init__(self, optimizer, way):
        super().__init__()
        torch.manual_seed(1)
        layers = (torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
        self.net, self.other = torch.nn.Sequential(*layers), torch.nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.optimizer, self.way = optimizer, way
        self.automatic_optimization = way == "automatic"

    def loss(self):
        self.seen += 1
        batch = torch.sin(torch.arange(48.0, device=self.device).view(8, 6) * (1 + self.seen % 7))
        return (self.net(batch) - self.other(batch)).pow(2).mean()

    def training_step(self, *_):
        if self.automatic_optimization:
            return self.loss()
        optimizers = self.optimizers()
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.zero_grad()
            loss = self.loss()
            self.manual_backward(loss)
            if self.way == "raw" and each is optimizers[0]:
                # Lightning does not count it.
                each.optimizer.step()
            else:
                each.step(*([self.again] if isinstance(each.optimizer, torch.optim.LBFGS) else []))
        return loss

    def again(self):
        loss = self.loss()
        self.manual_backward(loss)
        return loss

    def validation_step(self, *_):
        return self.net(torch.ones(8, 6, device=self.device)).mean()

    def configure_optimizers(self):
        if self.way == "automatic":
            return self.optimizer(self.parameters())
        return [self.optimizer(self.net.parameters()), torch.optim.SGD(self.other.parameters(), lr=0.1)]

    def train_dataloader(self):
        return DataLoader(torch.zeros(8, 1))

    val_dataloader = train_dataloader


class Moments:
    """What each save was given, copied at once; and captures that are put off until something waits for them."""

    def __init__(self, monkeypatch):
        self.states, self.overlapped, self.due = {}, 0, threading.Event()
        save, leave, finish = FullSaver.save, FullSaver._leave, FullSaver._finish
        wait, wait_for_all = Overlap.wait, BackgroundTask.wait

        def saving(saver, state, name, **options):
            self.states[name] = copy.deepcopy(state)
            return save(saver, state, name, **options)

        def leaving(saver, *taken):
            self.due.clear()
            return leave(saver, *taken)

        def waiting(overlap):
            self.due.set()
            wait(overlap)

        def waiting_for_all(task):
            if threading.get_ident() != task._thread and task.is_busy:
                self.due.set()
            wait_for_all(task)

        def finishing(saver, part, *taken):
            self.overlapped += 1
            self.due.wait(LATE_S)
            finish(saver, part, *taken)

        monkeypatch.setattr(FullSaver, "save", saving)
        monkeypatch.setattr(FullSaver, "_leave", leaving)
        monkeypatch.setattr(Overlap, "wait", waiting)
        monkeypatch.setattr(BackgroundTask, "wait", waiting_for_all)
        monkeypatch.setattr(FullSaver, "_finish", finishing)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def interleaved(seed, runs, monkeypatch):
    """A training, at random; each of its checkpoints, and a resume from one of them, are as if saves were eager."""
    draw = random.Random(seed)
    way = draw.choice(["automatic", "automatic", "manual", "raw"])
    names = [each for each in OPTIMIZERS if way != "raw" or each != "LBFGS"]
    optimizer = draw.choice(names)
    averaging = draw.choice(["", "", "swa", "ema"]) if way == "automatic" and optimizer != "LBFGS" else ""
    accumulated = draw.choice([1, 1, 2, 3]) if way == "automatic" else 1
    options = {
        "max_epochs": 3,
        "max_steps": -1,
        "accumulate_grad_batches": accumulated,
        "gradient_clip_val": draw.choice([None, 0.5]) if way == "automatic" and "fused" not in optimizer else None,
        "val_check_interval": draw.choice([1.0, 0.5]),
        "num_sanity_val_steps": draw.choice([0, 1]),
    }
    every = draw.choice([1, 2, 3])
    durable = draw.choice([None, 4])
    steps = {"memory_every_n_train_steps": every, "s3_every_n_train_steps": durable, "save_top_k": -1}

    def fit(ckpt_path):
        extra = []
        if averaging == "swa":
            extra = [StochasticWeightAveraging(0.01, swa_epoch_start=1)]
        elif averaging and hasattr(lightning_callbacks, "EMAWeightAveraging"):
            extra = [lightning_callbacks.EMAWeightAveraging(decay=0.9)]
        model = Normed(OPTIMIZERS[optimizer], way)
        io = runs.io(staging="overlapped", memory_keep_last=100, max_pending=100, on_save_error="raise")
        trainer, _ = runs.fit(
            *extra, TieredModelCheckpoint(**steps), model=model, io=io, ckpt_path=ckpt_path, **options
        )
        return trainer, model

    moments = Moments(monkeypatch)
    trainer, model = fit(None)
    print(f"{seed=} {way} {optimizer} {averaging} {accumulated=} {options} {steps}: {moments.overlapped} overlapped")
    states = dict(moments.states)
    for name, state in states.items():
        found = trainer.io.load_checkpoint(name, weights_only=False)
        assert same(found, state), name
    trainer.io.teardown()
    middle = sorted(name for name in states if name.startswith("memory/"))
    # Of an epoch that was begun, Lightning 2.4 trains some batches twice, whatever saved it.
    if middle and averaging != "swa" and not lightning.__version__.startswith("2.4"):
        overlapped = moments.overlapped
        _, resumed = fit(draw.choice(middle))
        assert same(dict(resumed.state_dict()), dict(model.state_dict()))
        return overlapped
    return moments.overlapped


#: Of CI, which tries a part of them.
ONE_OF, SEED = int(os.environ.get("ONE_OF") or 1), int(os.environ.get("SEED") or 0)


def test_a_few_interleavings(runs, monkeypatch):
    counts = []
    for seed in (0, 4):
        with monkeypatch.context() as patch:
            counts.append(interleaved(seed, runs, patch))
        runs.wipe()
    assert sum(counts) > 10, counts


@pytest.mark.matrix
@pytest.mark.parametrize("first", range(4 * (SEED % ONE_OF), 200, 4 * ONE_OF))
def test_two_hundred_interleavings(first, runs, monkeypatch):
    for seed in range(first, first + 4):
        with monkeypatch.context() as patch:
            interleaved(seed, runs, patch)
        runs.wipe()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("optimizer", ["AdamW foreach", "AdamW fused", "SGD fused"])
def test_a_cuda_training_resumes_from_an_overlapped_save_as_from_an_eager_one(optimizer, runs, monkeypatch):
    ends = []
    for staging in ("eager", "overlapped"):
        with monkeypatch.context() as patch:
            moments = Moments(patch)

            def fit(ckpt_path, staging=staging):
                io = runs.io(staging=staging, memory_keep_last=100, on_save_error="raise")
                model = Normed(OPTIMIZERS[optimizer], "automatic")
                callback = TieredModelCheckpoint(memory_every_n_train_steps=2, save_top_k=-1)
                options = {"accelerator": "gpu", "devices": 1, "max_steps": 13}
                return runs.fit(callback, model=model, io=io, ckpt_path=ckpt_path, **options)[0], model

            trainer, model = fit(None)
            states = dict(moments.states)
            for name, state in states.items():
                assert same(trainer.io.load_checkpoint(name, weights_only=False), state), name
            trainer.io.teardown()
            (middle,) = [name for name in states if name.endswith("=6.ckpt")]
            _, resumed = fit(middle)
            assert same(dict(resumed.state_dict()), dict(model.state_dict()))
            ends.append({key: value.cpu() for key, value in model.state_dict().items()})
            assert (moments.overlapped > 0) == (staging == "overlapped")
        runs.wipe()
    assert same(*ends)


class Averaged(Normed):
    """Validates with other weights, as optimizers without a schedule have it."""

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.kept = self.net[0].weight.detach().clone()
        self.net[0].weight.data.mul_(0.5)

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.net[0].weight.data.copy_(self.kept)


def test_other_weights_for_validation_are_not_in_the_save_before_it(runs, monkeypatch, caplog):
    moments = Moments(monkeypatch)
    model = Averaged(OPTIMIZERS["AdamW foreach"], "automatic")
    io = runs.io(staging="overlapped", memory_keep_last=100)
    callback = TieredModelCheckpoint(memory_every_n_train_steps=1, save_top_k=-1)
    trainer, _ = runs.fit(callback, model=model, io=io, ckpt_path=None, max_steps=8, val_check_interval=2)
    assert not [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert moments.overlapped >= 7
    for name, state in moments.states.items():
        assert same(trainer.io.load_checkpoint(name, weights_only=False), state), name
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)
    trainer.io.teardown()


class Careless(Normed):
    """Halves its weights now and then, in a way that no version counter shows."""

    def training_step(self, *_):
        if self.global_step == 9:
            self.net[0].weight.data.mul_(0.5)
        return super().training_step()


def test_what_else_changes_a_weight_fails_that_save_and_later_ones_are_eager(runs, monkeypatch, caplog):
    moments = Moments(monkeypatch)
    model = Careless(OPTIMIZERS["SGD fused"], "automatic")
    io = runs.io(staging="overlapped", memory_keep_last=100)
    callback = TieredModelCheckpoint(memory_every_n_train_steps=3)
    trainer, _ = runs.fit(callback, model=model, io=io, ckpt_path=None, max_steps=16)
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "memory/epoch=1-step=9.ckpt failed: the checkpoint is not saved: a parameter" in line
    assert "use staging: eager" in line
    assert moments.overlapped == 3, "steps 3, 6 and 9"
    assert trainer.io.checkpointer.session.progress().counters["failed"] == 1
    names = [name for name in moments.states if name.startswith("memory/") and "=9" not in name]
    assert len(names) == 4
    for name in names:
        assert same(trainer.io.load_checkpoint(name, weights_only=False), moments.states[name])
    trainer.io.teardown()


def test_what_a_save_that_failed_beside_training_was_to_replace_goes_once_the_next_is_durable(runs, monkeypatch):
    seal = PartSave.seal

    def fails(part, *args, **options):
        if part.facts.step == 4:
            raise OSError("no such device")
        seal(part, *args, **options)

    monkeypatch.setattr(PartSave, "seal", fails)
    callback = TieredModelCheckpoint(s3_every_n_train_steps=2)
    trainer, _ = runs.fit(callback, io=runs.io(staging="overlapped"), max_steps=8, ckpt_path=None)
    assert trainer.io.checkpointer.session.progress().counters["failed"] == 1
    assert runs.durable() == ["epoch=0-step=8.ckpt"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.matrix)], ids=["goes on", "saves again"])
def test_a_capture_that_takes_too_long_is_given_up_and_stops_no_training(every, runs, monkeypatch, caplog):
    fill, ended = PartSave.fill, threading.Event()

    def slow(part, *, hashed=True):
        if part.facts.step == 4 and part.overlapped is not None:
            ended.wait(20)
        fill(part, hashed=hashed)

    class Ends(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 5:
                # Where the next save has waited for it in vain.
                threading.Timer(0 if every == 2 else 2, ended.set).start()

    monkeypatch.setattr(PartSave, "fill", slow)
    callback = TieredModelCheckpoint(memory_every_n_train_steps=every, save_top_k=0)
    io = runs.io(staging="overlapped", wait_timeout_s=1, memory_keep_last=100)
    trainer, _ = runs.fit(Ends(), callback, io=io, max_steps=10, ckpt_path=None)
    assert trainer.global_step == 10
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "that checkpoint is given up, training continues" in line]
    assert [line for line in said if "step=4.ckpt failed: the checkpoint is not saved: it took so long" in line]
    assert trainer.io.load_checkpoint("tiered:latest")["global_step"] == 10
    held = {stored.part.content.step for stored in trainer.io.checkpointer.session.open().tier.parts()}
    assert 4 not in held
    trainer.io.teardown()


class InBackward(Normed):
    """Its optimizer steps during the backward pass."""

    def configure_optimizers(self):
        self.net[0].weight.register_post_accumulate_grad_hook(self.step)
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def step(self, weight):
        weight.data.add_(weight.grad, alpha=-0.01)


def test_optimizers_that_step_in_backward_save_eagerly(runs, monkeypatch, caplog):
    caplog.set_level("INFO")
    moments = Moments(monkeypatch)
    io = runs.io(staging="overlapped")
    model = InBackward(None, "automatic")
    runs.fit(TieredModelCheckpoint(memory_every_n_train_steps=3), model=model, io=io, ckpt_path=None, max_steps=7)
    assert moments.overlapped == 0
    lines = [each.getMessage() for each in caplog.records if "staging is overlapped" in each.getMessage()]
    assert len(lines) == 1
    assert "a parameter's optimizer steps during the backward pass" in lines[0]


def test_without_a_trainer_saves_are_eager_which_is_said_once(runs, caplog):
    caplog.set_level("INFO")
    io = runs.io(staging="overlapped")
    weight = torch.zeros(1000)
    for step in (1, 2):
        io.save_checkpoint({"state_dict": {"w": weight}, "global_step": step}, f"{step}.ckpt", {"tiers": ["memory"]})
        weight += 1
    assert [io.load_checkpoint(f"{step}.ckpt")["state_dict"]["w"][0] for step in (1, 2)] == [0, 1]
    assert len([each for each in caplog.records if "captured before a save returns" in each.getMessage()]) == 1
    io.teardown()
