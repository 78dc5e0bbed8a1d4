"""``last.ckpt`` is a file as any other: what loads it, what it costs, and how it replaces what earlier releases left."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from support.training import Model, Runs

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.errors import ConfigError

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
    # Under another inode: on this file system the copy may be a hard link.
    (tmp_path / "damaged").write_bytes(data)
    os.replace(tmp_path / "damaged", path)
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
