"""Settings of the SageMaker library work here, and its refusals come in its words."""

import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tiered_checkpoint_io import TieredStorageReader, TieredStorageWriter
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BASE = "s3://bucket/base"


@pytest.mark.parametrize(
    ("checkpoint_id", "step", "located"),
    [
        ("step_5", None, (BASE, "step_5", 5)),
        (None, 7, (BASE, "step_7", 7)),
        ("step_5", 7, (BASE, "step_7", 7)),
        ("step_0", None, (BASE, "step_0", 0)),
        ("any/path/here", 3, (BASE, "any/path/here/step_3", 3)),
        ("/mnt/ckpt/step_100/checkpoint", None, (BASE, "step_100", 100)),
        ("s3://bucket/base/run/step_4", None, (BASE, "run/step_4", 4)),
        ("./step_6", None, (BASE, "step_6", 6)),
        ("epoch=0-step=12.ckpt", None, (BASE, "epoch=0-step=12.ckpt", 12)),
        # Elsewhere.
        ("s3://other/runs/a/step_4", None, ("s3://other/runs/a", "step_4", 4)),
    ],
)
def test_a_checkpoint_id_and_a_step_name_a_checkpoint(checkpoint_id, step, located):
    assert ids.locate(BASE, checkpoint_id, step) == located


@pytest.mark.parametrize("path", ["../step_5", "a/../../step_5", "s3://bucket/base/../step_5", ".tiered/step_5"])
def test_no_checkpoint_id_leads_out_of_its_folder(path):
    with pytest.raises(ConfigError):
        ids.locate(BASE, path, None)


@pytest.mark.parametrize("step", [-1, 1.5, "7", True, 1 << 62])
def test_a_bad_step_is_refused(step, memory_dir):
    with pytest.raises(ConfigError, match="Invalid step value"):
        TieredStorageWriter(namespace="job", memory_dir=memory_dir, step=step)
    with pytest.raises(ConfigError, match="Invalid step value"):
        TieredStorageReader(namespace="job", memory_dir=memory_dir, step=step)


def test_a_save_without_any_step_is_refused(memory_dir):
    writer = TieredStorageWriter(namespace="job", memory_dir=memory_dir)
    with pytest.raises(BaseException, match=r"Invalid step value"):
        dcp.save({"t": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(BaseException, match=r"Invalid step value"):
        dcp.save({"t": torch.ones(2)}, checkpoint_id="model", storage_writer=writer)
    writer.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"namespace": ""}, "Namespace cannot be empty"),
        ({"namespace": "a/b"}, "namespace is 'a/b'"),
        ({"namespace": "job", "world_size": 0}, "world_size is 0"),
        ({"namespace": "job", "world_size": -2}, "world_size is -2"),
        ({"namespace": "job", "save_to_s3": True}, "no durable tier is named"),
        ({"namespace": "job", "s3_tier_base_path": "/mnt/ckpt"}, "must start with s3://"),
        ({"namespace": "job", "s3_tier_base_path": "s3://"}, "bucket"),
        ({"namespace": "job", "s3_every_n_steps": 0}, "s3_every_n_steps is 0"),
        ({"namespace": "job", "thread_count": 0}, "thread_count is 0"),
        ({"namespace": "job", "wordl_size": 2}, "unknown key 'wordl_size'"),
    ],
)
def test_bad_configurations_are_refused_and_say_what_is_allowed(options, says):
    with pytest.raises(ConfigError, match=says):
        TieredStorageWriter(**options)


def test_which_steps_go_to_the_durable_tier(memory_dir, tmp_path):
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "memory_keep_last": 9}

    def durable(writer, step):
        dcp.save({"t": torch.ones(2)}, checkpoint_id=f"step_{step}", storage_writer=writer)
        return "durable" in writer.last_save.tiers

    every = TieredStorageWriter(**options, s3_every_n_steps=2)
    assert [durable(every, step) for step in range(4)] == [True, False, True, False]
    assert durable(TieredStorageWriter(**options, s3_every_n_steps=2, save_to_s3=True), 5)
    assert durable(TieredStorageWriter(**options), 7)
    # A configuration in another form says the same.
    assert durable(TieredStorageWriter(TieredCheckpointConfig(**options)), 9)
    assert not durable(TieredStorageWriter(TieredCheckpointConfig(**options, s3_every_n_train_steps=2)), 11)
    # None of them, by itself.
    for block in (
        {**options, "s3_every_n_train_steps": None},
        TieredCheckpointConfig(**options, s3_every_n_train_steps=None),
    ):
        assert not durable(TieredStorageWriter(block), 12)
        assert durable(TieredStorageWriter(block, save_to_s3=True), 13)
    assert not durable(TieredStorageWriter(**options, s3_every_n_train_steps=None), 14)
    assert not durable(TieredStorageWriter({**options, "s3_every_n_train_steps": 2}, s3_every_n_train_steps=None), 14)
    every.wait(60)
    every.close()
    assert sorted(os.listdir(tmp_path / "durable")) == [".tiered", *(f"step_{step}" for step in (0, 13, 2, 5, 7, 9))]


class Gate:
    """Gate at which a save waits until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()


class Gated(dcp.DefaultSavePlanner):
    """A planner that keeps its save at a gate, at a moment of it."""

    def __init__(self, gate, moment):
        super().__init__()
        self._gate, self._moment = gate, moment

    def _pass(self, moment):
        if moment == self._moment:
            self._gate.reached.set()
            assert self._gate.opened.wait(60)

    def create_local_plan(self):
        self._pass("planning")
        return super().create_local_plan()

    def resolve_data(self, write_item):
        self._pass("writing")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("moment", ["planning", "writing"])
def test_a_later_save_by_the_same_writer_never_takes_the_state_of_an_earlier_one(memory_dir, tmp_path, moment):
    """DCP's async_save makes each save on a thread of its own."""
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}
    writer, gate = TieredStorageWriter(**options, save_to_s3=False), Gate()
    held = Gated(gate, moment)
    first = dcp.async_save({"t": torch.ones(9)}, checkpoint_id="step_1", storage_writer=writer, planner=held)
    assert gate.reached.wait(60)
    dcp.async_save({"t": torch.full((9,), 2.0)}, checkpoint_id="step_2", storage_writer=writer).result(60)
    gate.opened.set()
    with pytest.raises(dcp.api.CheckpointException, match="wait for the future of one async_save before the next"):
        first.result(60)
    for name in ("step_2", None):
        state = {"t": torch.zeros(9)}
        ours.load(state, checkpoint_id=name, **options)
        assert state["t"].tolist() == [2.0] * 9
    dcp.async_save({"t": torch.full((9,), 3.0)}, checkpoint_id="step_3", storage_writer=writer).result(60)
    writer.close()
