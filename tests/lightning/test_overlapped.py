"""Captures that overlap training: the saved state is that at the moment of the save, for any training."""

import copy
import functools
import threading

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.save.saver import FullSaver, PartSave

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, foreach=True)


class Normed(LightningModule):
    """Each batch depends only on the number of batches: Lightning does not wind a plain loader forward."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(1)
        layers = (torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
        self.net, self.other = torch.nn.Sequential(*layers), torch.nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.optimizer = optimizer

    def training_step(self, *_):
        self.seen += 1
        batch = torch.sin(torch.arange(48.0, device=self.device).view(8, 6) * (1 + self.seen % 7))
        return (self.net(batch) - self.other(batch)).pow(2).mean()

    def validation_step(self, *_):
        return self.net(torch.ones(8, 6, device=self.device)).mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())

    def train_dataloader(self):
        return DataLoader(torch.zeros(8, 1))

    val_dataloader = train_dataloader


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_a_gpu_copies_at_once_is_copied_before_another_stream_takes_it(runs, monkeypatch):
    states, save, clone = {}, FullSaver.save, torch.UntypedStorage.clone

    def saving(saver, state, wanted, **options):
        states[wanted.name] = copy.deepcopy(state)
        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "clone", slow)
            return save(saver, state, wanted, **options)

    def slow(storage):
        if storage.is_cuda:
            # Some 50 ms. The copy of the parameters begins 5 ms after the save.
            torch.cuda._sleep(100_000_000)
        return clone(storage)

    monkeypatch.setattr(FullSaver, "save", saving)
    io = runs.io(staging="overlapped", memory_keep_last=100, on_save_error="raise")
    callback = TieredModelCheckpoint(memory_every_n_train_steps=2, save_top_k=-1)
    options = {"accelerator": "gpu", "devices": 1, "max_steps": 8}
    model = Normed(ADAMW)
    trainer, _ = runs.fit(callback, model=model, io=io, ckpt_path=None, **options)
    assert len(states) >= 4
    for name, state in states.items():
        assert same(trainer.io.load_checkpoint(name, weights_only=False), state), name
    trainer.io.teardown()


def test_what_a_save_that_failed_beside_training_was_to_replace_stays(runs, monkeypatch):
    seal = PartSave.seal

    def fails(part, *args, **options):
        if part.facts.step == 4:
            raise OSError("no such device")
        seal(part, *args, **options)

    monkeypatch.setattr(PartSave, "seal", fails)
    callback = TieredModelCheckpoint(s3_every_n_train_steps=2)
    trainer, _ = runs.fit(callback, io=runs.io(staging="overlapped"), max_steps=8, ckpt_path=None)
    assert trainer.io.checkpointer.session.counts["failed"] == 1
    # One too many, which prune finds.
    assert runs.durable() == ["epoch=0-step=2.ckpt", "epoch=0-step=8.ckpt"]


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
                # If the next save has waited for it in vain.
                threading.Timer(0 if every == 2 else 2, ended.set).start()

    monkeypatch.setattr(PartSave, "fill", slow)
    callback = TieredModelCheckpoint(memory_every_n_train_steps=every, save_top_k=0)
    io = runs.io(staging="overlapped", wait_timeout_s=1, memory_keep_last=100)
    trainer, _ = runs.fit(Ends(), callback, io=io, max_steps=10, ckpt_path=None)
    assert trainer.global_step == 10
    assert [line for line in caplog.messages if "that checkpoint is given up, training continues" in line]
    assert [
        line for line in caplog.messages if "step=4.ckpt failed: the checkpoint is not saved: it took so long" in line
    ]
    assert trainer.io.load_checkpoint("tiered:latest")["global_step"] == 10
    held = {stored.part.content.step for stored in trainer.io.checkpointer.session.open().tier.parts()}
    assert 4 not in held
    trainer.io.teardown()


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
