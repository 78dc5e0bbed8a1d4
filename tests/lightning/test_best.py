"""The best checkpoints on the durable tier, and the last one: what loads it, its cost, and what it replaces."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from support.training import Model, Runs, durable

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.errors import ConfigError, StoreError
from tiered_checkpoint_io.stores.directory import DirectoryStore


def best(**options):
    return TieredModelCheckpoint(monitor="score", s3_every_n_train_steps=5, filename="best-{step}", **options)


class Scored(Model):
    """Logs a score of its own at each step."""

    scores = ()

    def training_step(self, batch, index):
        self.log("rated", torch.tensor(self.scores[self.global_step]))
        return super().training_step(batch, index)


@pytest.mark.parametrize("seed", range(3))
def test_as_many_stay_as_are_wanted_whichever_saves_find_the_queue_full(runs, monkeypatch, seed):
    """If a save is left out, the checkpoint that it would replace stays until the next replacement."""
    rng, has_room, landed = random.Random(seed), DrainHandle.has_room, []

    def may_be_full(self, *arguments, **options):
        landed.append(len(landed) < 3 or (rng.random() < 0.6 and has_room(self, *arguments, **options)))
        return landed[-1]

    monkeypatch.setattr(DrainHandle, "has_room", may_be_full)
    model, every = Scored(), {"s3_every_n_train_steps": 1, "save_on_train_end": False}
    model.scores = [rng.random() for _ in range(40)]
    kept = TieredModelCheckpoint(monitor="rated", mode="max", save_top_k=3, filename="{step}", **every)
    trainer, _ = runs.fit(kept, ckpt_path=None, max_steps=40, model=model)
    trainer.io.teardown()
    assert len(runs.durable()) == 3 and not all(landed)
    best = [path.rpartition("/")[2] for path in kept.best_k_models]
    assert len(set(best) & set(runs.durable())) == sum(runs.io().checkpointer.exists(path) for path in best)


@pytest.fixture
def refusals(monkeypatch):
    """Has so many uploads of the better checkpoint fail; other uploads succeed."""
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
    """If S3 fails for one checkpoint, its predecessor stays until the checkpoint is there, or for good."""
    refusals[0] = failures
    newest, kept = TieredModelCheckpoint(s3_every_n_train_steps=5), best()
    model = Patient() if step == 10 else Model()
    io = runs.io(max_pending=max_pending)
    runs.fit(newest, kept, io=io, ckpt_path=None, max_steps=17, model=model)
    assert runs.durable() == [f"best-step={step}.ckpt", "epoch=0-step=15.ckpt"]


# -------------------------------------------------------------------- policies of the durable tier
POLICIES = [{"latest": 2}, {"every_steps": 10}, {"best": 1, "metric": "score", "mode": "max"}]


def best_of_policies(**more):
    named = {"monitor": "score", "mode": "max", "s3_every_n_train_steps": 2, "filename": "{step}"}
    return TieredModelCheckpoint(**{**named, **more})


def test_policies_decide_in_place_of_save_top_k(s3_url, memory_dir, tmp_path):
    """Only policies thin the callback's checkpoints; last.ckpt is replaced, and the best stays at its path."""
    runs = Runs(s3_url, memory_dir, tmp_path)
    io = runs.io(retention=POLICIES)
    callback = best_of_policies(save_top_k=-1, save_last=True)
    trainer, _ = runs.fit(callback, io=io)
    # The score is 9 at steps 8 and 18, of which the earlier is the best.
    assert runs.durable() == ["last.ckpt", "step=10.ckpt", "step=18.ckpt", "step=20.ckpt", "step=8.ckpt"]
    assert callback.best_model_path.endswith("/step=8.ckpt")
    assert trainer.io.load_checkpoint(callback.best_model_path)["global_step"] == 8
    trainer.io.teardown()


@pytest.mark.parametrize(
    ("callback", "policies", "said"),
    [
        ({"save_top_k": 3}, POLICIES, "add {best: 3, metric: score, mode: max} to retention"),
        ({"mode": "min"}, POLICIES, "add {best: 1, metric: score, mode: min} to retention"),
        ({"save_top_k": -1}, [{"latest": 2}], "add {best: 1, metric: score, mode: max} to retention"),
    ],
)
def test_a_callback_whose_best_would_be_removed_is_refused(runs, callback, policies, said):
    with pytest.raises(ConfigError, match="which no policy of retention keeps") as refused:
        runs.fit(best_of_policies(**callback), io=runs.io(retention=policies))
    assert said in str(refused.value)
    assert runs.durable() == []


#: In elements: so that a checkpoint is much larger than manifests.
BALLAST = 1 << 18


def newest(**more):
    return TieredModelCheckpoint(**{"s3_every_n_train_steps": 5, "save_top_k": 1, "save_last": True, **more})


def weight(state):
    return state["state_dict"]["layer.weight"]


def test_last_is_an_object_that_boto3_and_torch_load_and_of_which_nothing_was_sent(
    s3_url, s3_server, memory_dir, tmp_path
):
    runs = Runs(s3_url, memory_dir, tmp_path)
    _, model = runs.fit(newest(), model=Model(ballast=BALLAST), ckpt_path=None)
    (log,) = Path(memory_dir).glob("tiered-*/*/operations.log")
    drain = Queue(log.parent).progress()
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    s3_server.client.download_file(bucket, f"{prefix}/last.ckpt", str(tmp_path / "downloaded"))
    state = torch.load(tmp_path / "downloaded", weights_only=True)
    assert state["global_step"] == 20
    assert torch.equal(weight(state), model.layer.weight)
    size = os.path.getsize(tmp_path / "downloaded")
    assert size > 4 * BALLAST
    # Four steps were saved and uploaded; each became the last one.
    assert drain.counters["bytes.copied"] >= size
    assert 4 * size <= drain.counters["bytes.sent"] < 5 * size


@pytest.mark.parametrize(("before", "after"), [("link", True), (True, "link")])
def test_each_replaces_the_other_and_resumes_from_it(runs, before, after):
    runs.fit(newest(save_last=before), max_steps=5, ckpt_path=None)
    runs.wipe()
    callback = newest(save_last=after)
    trainer, model = runs.fit(callback, ckpt_path="last", max_steps=20, max_epochs=9)
    assert (trainer.io.checkpointer.restored.step, trainer.global_step) == (5, 20)
    assert {"epoch=0-step=20.ckpt", "last.ckpt"} <= set(runs.durable())
    # A link is an alias that loads only through this package.
    assert os.path.exists(callback.last_model_path) == (after is True)
    trainer.io.teardown()
    runs.wipe()
    for name in (callback.last_model_path, "last.ckpt"):
        assert torch.equal(model.layer.weight, weight(runs.io().load_checkpoint(name)))


def test_a_restart_reads_the_checkpoint_in_memory_and_not_its_copy(runs):
    runs.fit(newest(), ckpt_path=None)
    for sentinel in ("last", "tiered:latest"):
        trainer, _ = runs.fit(newest(), ckpt_path=sentinel, max_steps=20)
        restored = trainer.io.checkpointer.restored
        assert (restored.name, restored.tier) == ("epoch=0-step=20.ckpt", "memory")


def test_of_a_checkpoint_and_its_copy_the_one_that_is_intact_is_resumed_from(runs, tmp_path):
    runs.fit(newest(), ckpt_path=None)
    runs.wipe()
    path = os.path.join(runs.dirpath, "epoch=0-step=20.ckpt")
    with open(path, "rb") as file:
        data = bytearray(file.read())
    data[len(data) // 2] ^= 1
    with open(path, "wb") as file:
        file.write(data)
    trainer, _ = runs.fit(newest(), ckpt_path="tiered:latest", max_steps=20)
    assert trainer.io.checkpointer.restored.name == "last.ckpt"
    assert trainer.global_step == 20


@pytest.mark.parametrize("save_last", [None, True])
def test_what_lightnings_on_exception_checkpoint_saved_is_a_last_as_well(runs, save_last):
    """With it, Lightning's ``fit`` without ``ckpt_path`` means the last one."""

    def both():
        return newest(s3_every_n_train_steps=2, save_last=save_last), OnExceptionCheckpoint(runs.dirpath)

    runs.fit(*both(), stop_at=5, ckpt_path=None)
    assert {"on_exception.ckpt", "epoch=0-step=4.ckpt"} <= set(runs.durable())
    trainer, _ = runs.fit(*both(), max_steps=9, ckpt_path=None)
    assert trainer.io.checkpointer.restored.step == 5
    # Lightning has it removed after a fit without an exception.
    trainer.io.teardown()
    assert "on_exception.ckpt" not in runs.durable()
    trainer, _ = runs.fit(*both(), max_steps=11, ckpt_path="last")
    restored = trainer.io.checkpointer.restored
    # Some releases save "last" once more when training ends.
    assert (restored and restored.step) in ((8, 9) if save_last else (None,))
    trainer.io.teardown()


@pytest.mark.parametrize("options", [{}, {"monitor": "step", "mode": "max"}, {"save_last": None}])
def test_a_checkpoint_that_is_saved_again_under_its_name_is_not_deleted(runs, options):
    callback = newest(filename="one", enable_version_counter=False, **options)
    trainer, _ = runs.fit(callback, ckpt_path=None)
    trainer.io.teardown()
    assert callback._withheld == []
    assert runs.durable() == ["last.ckpt", "one.ckpt"][-1 if "save_last" in options else 0 :]
    assert runs.io().load_checkpoint("one.ckpt")["global_step"] == 20


def test_an_on_exception_checkpoint_that_is_in_no_tier_is_warned_of(runs, tmp_path, caplog):
    for _ in range(2):
        runs.fit(newest(save_last=True), OnExceptionCheckpoint(tmp_path / "elsewhere"), max_steps=5)
    assert caplog.text.count("OnExceptionCheckpoint saves to") == 2, "once a run"


def test_an_on_exception_checkpoint_that_can_not_be_saved_is_an_error_before_training(runs):
    trainer = runs.trainer([newest(), OnExceptionCheckpoint("../elsewhere")])
    with pytest.raises(ConfigError, match="has an empty, '.' or '..' component"):
        trainer.fit(Model())
    assert trainer.global_step == 0
    trainer.io.teardown()
