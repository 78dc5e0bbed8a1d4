"""The best checkpoints on the durable tier, where one of them does not get there."""

import time

import pytest
from support.training import Model, durable

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.directory import DirectoryStore


def best(**options):
    return TieredModelCheckpoint(monitor="score", s3_every_n_train_steps=5, filename="best-{step}", **options)


def test_the_best_stays_while_the_better_one_is_not_on_the_durable_tier(runs, monkeypatch):
    has_room, asked = DrainHandle.has_room, []

    def is_full_once(self, *arguments, **options):
        asked.append(self)
        return len(asked) != 2 and has_room(self, *arguments, **options)

    monkeypatch.setattr(DrainHandle, "has_room", is_full_once)
    # The scores of steps 5, 10, 15 and 20 are 8, 3, 8 and 3: step 10 takes the place of step 5, and is left out.
    first = best(save_last=True)
    runs.fit(first, ckpt_path=None, max_steps=16)
    assert first.best_model_path.endswith("best-step=5.ckpt")
    assert (runs.durable(), float(first.best_model_score)) == (["best-step=5.ckpt", "last.ckpt"], 8)
    # Nor does the next run delete it, before it has a better one.
    runs.wipe()
    trainer, _ = runs.fit(best(save_last=True), ckpt_path="last", max_steps=19)
    assert (trainer.global_step, runs.durable()) == (19, ["best-step=5.ckpt", "last.ckpt"])
    runs.fit(best(save_last=True), ckpt_path="last", max_steps=21)
    assert runs.durable() == ["best-step=20.ckpt", "last.ckpt"]


@pytest.fixture
def refusals(monkeypatch):
    """So many uploads of the better checkpoint fail; others get through."""
    left = [0]

    def failing(upload):
        def failed_or_done(self, key, *arguments, **options):
            if key.endswith("best-step=10.ckpt") and left[0] > 0:
                left[0] -= 1
                raise StoreError("slow down", operation="put", key=key, reason="unavailable")
            return upload(self, key, *arguments, **options)

        return failed_or_done

    for name in ("upload", "upload_if"):
        monkeypatch.setattr(DirectoryStore, name, failing(getattr(DirectoryStore, name)))
    return left


class Patient(Model):
    """Trains on only once the better one is there, or late."""

    def on_train_batch_end(self, *_):
        callbacks, deadline = self.trainer.checkpoint_callbacks, time.monotonic() + 20
        while self.global_step == 16 and "best-step=10.ckpt" not in durable(callbacks[0].dirpath):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


@pytest.mark.parametrize(("failures", "max_pending", "step"), [(1, 4, 10), (1000, 1, 5)], ids=["retried", "given-up"])
def test_what_others_save_does_not_take_the_place_of_the_best(runs, refusals, failures, max_pending, step):
    """Where S3 fails for one checkpoint alone: what it replaces stays until it is there, and is the best without it."""
    refusals[0] = failures
    newest, kept = TieredModelCheckpoint(s3_every_n_train_steps=5), best()
    model = Patient() if step == 10 else Model()
    io = runs.io(max_pending=max_pending)
    trainer, _ = runs.fit(newest, kept, io=io, ckpt_path=None, max_steps=17, model=model)
    assert runs.durable() == [f"best-step={step}.ckpt", "epoch=0-step=15.ckpt"]
    assert [path.rpartition("/")[2] for path in kept.best_k_models] == [f"best-step={step}.ckpt"]
    assert kept.best_model_path in kept.best_k_models
    runs.wipe()
    trainer.test(model, ckpt_path="best", verbose=False)


def test_the_best_of_a_run_whose_node_was_lost_is_one_that_is_there(runs, refusals):
    """The better one was queued when a checkpoint was saved, and was lost with the node's memory.

    That of step 20 is no better than it, and better than the one that is there.
    """
    refusals[0] = 1000
    newest = TieredModelCheckpoint(s3_every_n_train_steps=5)
    runs.fit(newest, best(), io=runs.io(max_pending=4), ckpt_path=None, stop_at=17)
    assert runs.durable() == ["best-step=5.ckpt", "epoch=0-step=15.ckpt"]
    runs.wipe()
    refusals[0] = 0
    kept = best()
    runs.fit(TieredModelCheckpoint(s3_every_n_train_steps=5), kept, max_steps=21)
    # That of step 15 is what the run has resumed from.
    assert runs.durable() == ["best-step=20.ckpt", "epoch=0-step=15.ckpt", "epoch=0-step=20.ckpt"]
    assert [path.rpartition("/")[2] for path in kept.best_k_models] == ["best-step=20.ckpt"]
