"""The best checkpoints on the durable tier, and the last one: what loads it, its cost, and what it replaces."""

import os
import random
from pathlib import Path

import pytest
import torch
from support.training import Model, Runs

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.errors import ConfigError


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
