"""What an overlapped save copies at once: in time, and where there is no room for it, an eager save."""

import copy

import pytest
import torch

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.save.full import FullSaver
from tiered_checkpoint_io.engine.save.overlap import CHECK, Overlap
from tiered_checkpoint_io.engine.save.snapshot import Snapshot

from .test_overlapped import OPTIMIZERS, Moments, Normed, same


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
    model = Normed(OPTIMIZERS["AdamW foreach"], "automatic")
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
    model = Normed(OPTIMIZERS["AdamW foreach"], "automatic")
    trainer, _ = runs.fit(callback, model=model, io=io, ckpt_path=None, **options)
    assert len(states) >= 4
    for name, state in states.items():
        assert same(trainer.io.load_checkpoint(name, weights_only=False), state), name
    trainer.io.teardown()
