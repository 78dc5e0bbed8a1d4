"""Parts of the support for NeMo that need only Lightning, on any installed release."""

import pickle
import threading

import pytest
import torch
from support.supporting import build
from support.training import Model, Runs, durable

from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.nemo.checkpoint import TieredNeMoCheckpoint
from tiered_checkpoint_io.nemo.connector import NeMoCheckpointConnector, Rules
from tiered_checkpoint_io.nemo.io import NeMoCheckpointIO, S3CheckpointIO
from tiered_checkpoint_io.stores.directory import DirectoryStore


class NeMoParts(Runs):
    """Trainings as NeMo's exp_manager sets them up, without NeMo."""

    def train(self, max_steps, *, rules=None, stop_at=0, callback=None, connector=NeMoCheckpointConnector, **io):
        callback = callback or self.callback()
        options = {"memory_dir": self.memory_dir, "wait_timeout_s": 60, "drain": "thread", **io}
        made = build(NeMoCheckpointIO, self.dirpath, **options)
        trainer = self.trainer([callback], io=made, asynchronous=False, max_steps=max_steps)
        if rules is not None:
            connector.of(trainer).resume_by(rules)
        trainer.callback = callback
        trainer.module = Model(stop_at)
        try:
            trainer.fit(trainer.module)
        except Exception as error:
            if type(error).__name__ != "Stop":
                raise
            made.teardown()
        return trainer

    @staticmethod
    def callback(**options):
        settings = {"monitor": "score", "save_top_k": 2, "filename": "{score:.1f}-{step}", "save_last": True}
        return TieredNeMoCheckpoint(
            **{**settings, "every_n_train_steps": 5, "save_nemo_on_train_end": False, **options}
        )


@pytest.fixture
def job(tmp_path, memory_dir):
    return NeMoParts(str(tmp_path / "durable"), memory_dir, tmp_path)


FRESH = Rules(resume_ignore_no_checkpoint=True)


# ---------------------------------------------------------------------------------------------- IO
def test_the_constructor_is_nemos_keyword_for_keyword():
    io = S3CheckpointIO("s3://bucket/run", 32, 15, 10, True)
    config = io.config
    assert (config.chunk_size_MB, config.max_read_concurrency, config.max_write_concurrency) == (32, 15, 10)
    assert io.async_checkpointing
    # A block without these keys gives None, by NeMo's own example.
    assert S3CheckpointIO(dirpath="s3://bucket/run", chunk_size_MB=None, max_read_concurrency=None).config == (
        S3CheckpointIO(dirpath="s3://bucket/run").config
    )
    with pytest.raises(ConfigError, match="give an S3 URL"):
        S3CheckpointIO(dirpath="/local")
    assert pickle.loads(pickle.dumps(io)).async_checkpointing


@pytest.fixture
def held(monkeypatch):
    """Yields an event until which no upload of a name with ``held`` in it comes to an end."""
    free = threading.Event()

    def waiting(upload):
        def waits(store, key, *args, **options):
            assert "held" not in key or free.wait(30)
            return upload(store, key, *args, **options)

        return waits

    for name in ("upload", "upload_if"):
        monkeypatch.setattr(DirectoryStore, name, waiting(getattr(DirectoryStore, name)))
    yield free
    free.set()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_finalize_fn_is_called_once_the_checkpoint_is_committed_and_never_for_one_that_failed(job, held, asynchronous):
    """Also if the save does not wait for that any longer."""
    options = {"memory_dir": job.memory_dir, "drain": "thread", "pending_timeout_s": 1, "max_pending": 1}
    io = build(NeMoCheckpointIO, job.dirpath, async_checkpointing=asynchronous, on_save_error="warn", **options)
    called = []
    # There is no room for the second in the queue: it stays in memory, and the durable tier never gets it.
    for name in ("held-1.ckpt", "held-2.ckpt"):
        state = {"global_step": 1, "w": torch.ones(3)}
        io.save_checkpoint(state, name, storage_options={"finalize_fn": lambda name=name: called.append(name)})
    assert called == []
    held.set()
    io.maybe_finalize_save_checkpoint(blocking=True)
    assert called == durable(job.dirpath) == ["held-1.ckpt"]
    then = {"tiers": ["memory"], "finalize_fn": lambda: called.append("memory")}
    io.save_checkpoint({"global_step": 1}, "held-3.ckpt", storage_options=then)
    assert called[1:] == ["memory"]
    then["finalize_fn"] = lambda: called.append("failed")
    io.save_checkpoint({"cannot": lambda: None}, "c.ckpt", storage_options=then)
    then |= {"finalize_fn": None, "include_optimizer": False}
    io.save_checkpoint({"global_step": 1, "optimizer_states": [1]}, "a.ckpt", storage_options=then)
    assert set(io.load_checkpoint("a.ckpt")) == {"global_step"}
    with pytest.raises(ConfigError, match="finalize_fn"):
        io.save_checkpoint({}, "d.ckpt", storage_options={"finalize_fn": 3})
    io.teardown()
    assert called[2:] == []


# ----------------------------------------------------------------------------------------- resuming
def test_without_a_checkpoint_training_starts_only_where_that_is_allowed(job, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="resume_ignore_no_checkpoint: true"):
        job.train(5, rules=Rules())
    trainer = job.train(5, rules=FRESH)
    assert trainer.global_step == 5
    assert trainer.ckpt_path is None
    # Another run's checkpoint, only for the first start.
    other = NeMoParts(str(tmp_path / "other"), job.memory_dir, tmp_path)
    rules = Rules(resume_ignore_no_checkpoint=True, resume_from_checkpoint=f"{job.dirpath}/score=8.0-step=5.ckpt")
    assert other.train(7, rules=rules, namespace="other").io.checkpointer.restored.step == 5
    assert other.train(9, rules=rules, namespace="other").io.checkpointer.restored.step == 7


def test_states_of_nemos_own_callback_are_known_by_its_key():
    callback = NeMoParts.callback()
    assert callback.state_key.startswith("NeMoModelCheckpoint{'monitor': 'score', 'mode': 'min',")


def test_what_follows_a_resumed_fit_goes_on_with_its_weights(job):
    """Not with those of the checkpoint that it resumed from, which may be gone from memory by now."""
    job.train(7, rules=FRESH)
    trainer = job.train(9, rules=Rules())
    assert trainer.io.checkpointer.restored.step == 7
    weights = trainer.module.layer.weight.clone()
    trainer.test(trainer.module)
    assert torch.equal(trainer.module.layer.weight, weights)
    trainer.test(trainer.module, ckpt_path=f"{job.dirpath}/score=8.0-step=5.ckpt")
    assert trainer.io.checkpointer.restored.step == 5
    assert not torch.equal(trainer.module.layer.weight, weights)
    # A start that only evaluates does so with what it finds.
    evaluates = job.trainer([], io=NeMoCheckpointIO(job.dirpath, memory_dir=job.memory_dir), asynchronous=False)
    NeMoCheckpointConnector.of(evaluates).resume_by(Rules())
    evaluates.test(Model())
    assert evaluates.io.checkpointer.restored.step == 9


def test_weights_of_the_best_beside_what_training_ended_with_are_not_resumed_from(job, caplog):
    trainer = job.train(15, rules=FRESH, callback=job.callback(save_best_model=True))
    assert trainer.callback.best_model_path == f"{job.dirpath}/score=3.0-step=10.ckpt"
    trainer.save_checkpoint(f"{job.dirpath}/final.ckpt")
    assert "averaged or best weights, and can't be resumed" in caplog.text
    assert (trainer.io.checkpointer.restored, trainer.ckpt_path) == (None, None)
    saved, best = (trainer.io.load_checkpoint(name) for name in ("final.ckpt", "score=3.0-step=10.ckpt"))
    trainer.io.teardown()
    assert saved["global_step"] == 15
    assert torch.equal(saved["state_dict"]["layer.weight"], best["state_dict"]["layer.weight"])
    assert job.train(16, rules=Rules()).io.checkpointer.restored.name == "score=8.0-step=15-last.ckpt"
