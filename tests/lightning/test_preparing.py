"""Room for a training's first save is made while its first batches run, and only where there will be one."""

import threading

import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks

from tests.support.training import Model
from tiered_checkpoint_io.adapters.sizes import size_here
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preparing import saves_by
from tiered_checkpoint_io.engine import checkpointer
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.staging.capture import Capturer

MIB = 1 << 20
BALLAST = 2 * MIB


@pytest.fixture
def prepared(monkeypatch):
    """The sizes that were prepared, and the number of saves before; nothing is too small for it."""
    sizes, prepare = [], Checkpointer.prepare

    def preparing_first(engine, size):
        sizes.append((size, engine.session.counts["saved"]))
        prepare(engine, size)

    monkeypatch.setattr(Checkpointer, "prepare", preparing_first)
    monkeypatch.setattr(checkpointer, "_LEAST_PREPARED", 1)
    return sizes


def callback(**options):
    return TieredModelCheckpoint(**{"memory_every_n_train_steps": 4, "s3_every_n_train_steps": 10, **options})


def sizes_of(report):
    """What may be prepared for a save: neither too small for it, nor much more."""
    return pytest.approx(report.size, rel=1 / 16)


def test_the_first_save_takes_what_was_prepared_for_it(runs, prepared, monkeypatch):
    taken, acquire = [], Capturer.acquire

    def acquiring(capturer, size, *args, **options):
        capturer._preparing.join()
        free = {slot.inode for slot in capturer._tier._pool._free}
        slot = acquire(capturer, size, *args, **options)
        taken.append((slot.inode in free, slot.touched))
        return slot

    monkeypatch.setattr(Capturer, "acquire", acquiring)
    trainer, _ = runs.fit(callback(), model=Model(ballast=BALLAST), max_steps=5)
    ((size, saved),) = prepared
    assert saved == 0
    assert size == sizes_of(trainer.io.checkpointer.session.last_save)
    was_free, touched = taken[0]
    assert was_free
    assert touched >= size
    assert not [each for each in threading.enumerate() if each.name == "tiered-prepare"], "it ends with the training"


def test_lightnings_own_model_checkpoint_gains_too_and_so_does_a_training_that_resumes(runs, prepared):
    class Steps(lightning_callbacks.Callback):
        """How often something was prepared, as each batch begins."""

        def on_train_batch_start(self, *_):
            seen.append(len(prepared))

    for trained in (0, 1):
        seen: list[int] = []
        saves = lightning_callbacks.ModelCheckpoint(every_n_train_steps=10)
        runs.fit(Steps(), saves, max_steps=20 * (trained + 1))
        assert seen == [trained] + [trained + 1] * 19, "after the first step: a restart has enough to do before"
    first, second = prepared
    assert first == second == (first[0], 0)


def test_a_small_state_is_not_prepared(runs):
    engine = runs.io().checkpointer
    engine.prepare(64 * MIB - 1)
    assert not engine.session.is_open


def test_what_is_never_saved_is_not_prepared(runs, prepared):
    runs.fit(callback(memory_every_n_train_steps=5, save_top_k=0), max_steps=4)
    assert prepared == []


def test_preparing_never_fails_a_training(runs, prepared, monkeypatch):
    def refuse(*_):
        raise OSError("no memory")

    monkeypatch.setattr(Capturer, "prepare", refuse)
    assert runs.fit(callback(), max_steps=4)[0].global_step == 4
    assert len(prepared) == 1


@pytest.mark.parametrize(
    ("callbacks", "last_step", "saves"),
    [
        ([], float("inf"), False),
        ([callback()], 3, False),
        ([callback()], 4, True),
        ([callback(memory_every_n_train_steps=None)], 9, False),
        ([callback(memory_every_n_train_steps=None)], 10, True),
        ([callback(memory_every_n_train_steps=None, save_top_k=0)], 10, False),
        ([callback(memory_every_n_train_steps=None, save_top_k=0, save_last=True)], 10, True),
        ([callback(s3_every_n_train_steps=None, every_n_epochs=1)], 1, True),
        ([lightning_callbacks.OnExceptionCheckpoint(".")], 1, True),
    ],
)
def test_whether_anything_is_saved(callbacks, last_step, saves):
    assert saves_by(callbacks, 0, last_step) is saves
    assert saves_by(callbacks, 1_000, 1_000 + last_step) is saves, "after a resume"


def test_what_is_shared_or_has_no_bytes_here_does_not_count():
    model = Model(ballast=1000)
    model.tied = model.layer.weight
    model.later = torch.nn.LazyLinear(7)
    model.register_buffer("nowhere", torch.ones(1000, device="meta"))
    optimizer = torch.optim.Adam(model.layer.parameters())
    assert size_here(model, [optimizer]) == 4 * (1000 + 8 * 4 + 4)
    model.layer(torch.ones(8)).sum().backward()
    optimizer.step()
    assert size_here(model, [optimizer]) == 4 * (1000 + 3 * (8 * 4 + 4) + 2)
