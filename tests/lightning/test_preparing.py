"""Room for a training's first save is made while its first batches run, and only if there will be one."""

import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks

from tests.support.training import Model
from tiered_checkpoint_io.adapters.optimizers import size_here
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.checkpointer import Checkpointer

MIB = 1 << 20


@pytest.fixture
def prepared(monkeypatch):
    """The sizes that were prepared."""
    sizes, prepare = [], Checkpointer.prepare
    monkeypatch.setattr(Checkpointer, "prepare", lambda engine, size: sizes.append(size) or prepare(engine, size))
    return sizes


@pytest.mark.parametrize(
    "callback",
    [
        lambda: TieredModelCheckpoint(memory_every_n_train_steps=4, save_top_k=0),
        lambda: lightning_callbacks.ModelCheckpoint(every_n_train_steps=10),
    ],
    ids=["ours", "lightnings"],
)
def test_the_first_save_of_a_training_is_prepared_once_after_its_first_step(callback, runs, prepared):
    class Steps(lightning_callbacks.Callback):
        def on_train_batch_start(self, *_):
            seen.append(len(prepared))

    for trained in (0, 1):
        seen: list[int] = []
        trainer, _ = runs.fit(Steps(), callback(), model=Model(ballast=2 * MIB), max_steps=20 * (trained + 1))
        assert seen == [trained] + [trained + 1] * 19, "after the first step: a restart has enough to do before"
    assert prepared == [pytest.approx(trainer.io.checkpointer.session.last_save.size, rel=1 / 16)] * 2


def test_a_small_state_and_one_that_no_callback_saves_are_not_prepared(runs, prepared):
    engine = runs.io().checkpointer
    engine.prepare(64 * MIB - 1)
    assert not engine.session.is_open
    prepared.clear()
    runs.fit(TieredModelCheckpoint(save_top_k=0), max_steps=2)
    assert prepared == []


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
