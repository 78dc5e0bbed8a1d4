"""What an overlapped save copies at once: in time, and where there is no room for it, an eager save."""

import copy
import threading

import lightning
import pytest
import torch

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.save.full import FullSaver
from tiered_checkpoint_io.engine.save.overlap import CHECK, Overlap
from tiered_checkpoint_io.engine.save.part import PartSave
from tiered_checkpoint_io.engine.save.snapshot import Snapshot
from tiered_checkpoint_io.engine.staging.latch import Latch
from tiered_checkpoint_io.errors import SaveError

from .test_overlapped import OPTIMIZERS, Moments, Normed, same

TO_MEMORY = {"memory_every_n_train_steps": 2, "save_top_k": -1}


def no_room(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("what", [torch.UntypedStorage, torch.Tensor], ids=["of the rest", "to compare with"])
def test_where_a_gpu_has_no_room_for_copies_saves_are_eager(what, runs, monkeypatch, caplog):
    """A stand-in for a full GPU: no copy is made there."""
    monkeypatch.setenv(CHECK, "1")
    caplog.set_level("INFO")
    save = FullSaver.save

    def when_full(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(what, "clone", no_room)
            return save(*args, **options)

    monkeypatch.setattr(FullSaver, "save", when_full)
    moments = Moments(monkeypatch)
    io = runs.io(staging="overlapped", memory_keep_last=100, on_save_error="raise")
    callback = TieredModelCheckpoint(memory_every_n_train_steps=2, save_top_k=-1)
    model = Normed(OPTIMIZERS["AdamW foreach"])
    trainer, _ = runs.fit(callback, model=model, io=io, ckpt_path=None, max_steps=7)
    assert moments.overlapped == 0
    assert len([line for line in caplog.messages if "the GPU has no room for the copies" in line]) == 1
    for name, state in moments.states.items():
        assert same(trainer.io.load_checkpoint(name, weights_only=False), state), name
    trainer.io.teardown()


def test_and_so_are_sharded_ones(runs, monkeypatch):
    weight = torch.zeros(100)
    io = runs.io(staging="overlapped")
    overlap = Overlap(io.checkpointer.session, lambda: [weight])
    state = {"w": weight, "mean": torch.zeros(10)}
    assert overlap.begin_state(state) is not None
    monkeypatch.setattr(Snapshot, "copy", no_room)
    assert overlap.begin_state(state) is None
    io.teardown()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_a_gpu_copies_at_once_is_copied_before_another_stream_takes_it(runs, monkeypatch):
    states, save, clone = {}, FullSaver.save, torch.UntypedStorage.clone

    def saving(saver, state, name, **options):
        states[name] = copy.deepcopy(state)
        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "clone", slow)
            return save(saver, state, name, **options)

    def slow(storage):
        if storage.is_cuda:
            # Some 50 ms. The copy of the parameters begins 5 ms after the save.
            torch.cuda._sleep(100_000_000)
        return clone(storage)

    monkeypatch.setattr(FullSaver, "save", saving)
    io = runs.io(staging="overlapped", memory_keep_last=100, on_save_error="raise")
    callback = TieredModelCheckpoint(memory_every_n_train_steps=2, save_top_k=-1)
    options = {"accelerator": "gpu", "devices": 1, "max_steps": 8}
    model = Normed(OPTIMIZERS["AdamW foreach"])
    trainer, _ = runs.fit(callback, model=model, io=io, ckpt_path=None, **options)
    assert len(states) >= 4
    for name, state in states.items():
        assert same(trainer.io.load_checkpoint(name, weights_only=False), state), name
    trainer.io.teardown()


class EMA(lightning.pytorch.Callback):
    """A stand-in for NeMo's, which is known by its name."""

    def save_ema_model(self, trainer):
        raise NotImplementedError

    def save_original_optimizer_state(self, trainer):
        raise NotImplementedError


def test_beside_nemos_averages_saves_are_eager(runs, monkeypatch, caplog):
    caplog.set_level("INFO")
    moments = Moments(monkeypatch)
    io = runs.io(staging="overlapped", memory_keep_last=100)
    model = Normed(OPTIMIZERS["SGD"])
    trainer, _ = runs.fit(EMA(), TieredModelCheckpoint(**TO_MEMORY), model=model, io=io, ckpt_path=None, max_steps=8)
    assert moments.overlapped == 0
    assert moments.states
    assert len([line for line in caplog.messages if "NeMo's EMA puts its averages" in line]) == 1
    trainer.io.teardown()


@pytest.mark.timeout(60)
def test_a_capture_that_takes_too_long_ends_a_training_once_and_its_callbacks_see_why(runs, monkeypatch):
    fill, wait, ended, waits, seen = PartSave.fill, Latch.wait, threading.Event(), [], []

    def slow(part, *, hashed=True):
        if part.overlapped is not None:
            ended.wait(20)
        fill(part, hashed=hashed)

    def waiting(latch, timeout_s):
        waits.extend([timeout_s] if timeout_s >= 1 else [])
        return wait(latch, timeout_s)

    class Ends(lightning.pytorch.Callback):
        def on_exception(self, trainer, module, exception):
            seen.append((exception, len(waits)))
            ended.set()

    monkeypatch.setattr(PartSave, "fill", slow)
    monkeypatch.setattr(Latch, "wait", waiting)
    io = runs.io(staging="overlapped", wait_timeout_s=1, memory_keep_last=100, on_save_error="raise")
    with pytest.raises(SaveError, match="not captured after 1 s") as raised:
        runs.fit(TieredModelCheckpoint(**TO_MEMORY), Ends(), io=io, max_steps=10, ckpt_path=None)
    assert seen == [(raised.value, 1)]
