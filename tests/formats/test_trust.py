"""Checkpoints that hold more than tensors and plain data: refused, unless they are allowed by name or altogether."""

import contextlib
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.supporting import build
from torch.distributed.checkpoint.api import CheckpointException

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageReader, TieredStorageWriter
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Schedule:
    """An object of the user's own."""

    def __init__(self, warmup):
        self.warmup = warmup


class Intruder:
    """Runs code if it is unpickled without care."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (os.mkdir, (str(self.witness),))


#: torch's own.
FORCED = pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
NAME = f"{Schedule.__module__}.Schedule"


class Saved:
    """A checkpoint of one kind that holds an object besides its tensors."""

    def __init__(self, kind, folder, memory_dir):
        self.kind = kind
        self.options = {"dirpath": str(folder), "memory_dir": memory_dir, "on_save_error": "raise", "drain": "thread"}

    def save(self, held):
        state = {"w": torch.arange(4.0), "held": held}
        if self.kind == "full":
            io = build(TieredCheckpointIO, **self.options)
            io.save_checkpoint(state, "step=1.ckpt")
            io.teardown()
            return
        with contextlib.closing(build(TieredStorageWriter, **self.options)) as writer:
            ours.save(state, checkpoint_id="step_1", kind=self.kind, storage_writer=writer)

    def load(self, **trust):
        if self.kind == "full":
            io = build(TieredCheckpointIO, **self.options, **trust)
            try:
                return io.load_checkpoint("step=1.ckpt")["held"]
            finally:
                io.teardown()
        state = {"w": torch.zeros(4), "held": None}
        with contextlib.closing(build(TieredStorageReader, **self.options, **trust)) as reader:
            ours.load(state, kind=self.kind, storage_reader=reader)
        return state["held"]


@pytest.fixture(params=["full", "sharded", "local"])
def saved(request, durable_dir, memory_dir):
    return Saved(request.param, durable_dir, memory_dir)


def refusal(saved, **trust):
    with pytest.raises((RestoreError, CheckpointException)) as caught:
        saved.load(**trust)
    failures = getattr(caught.value, "failures", {0: (caught.value, None)})
    assert all(isinstance(failure, TieredCheckpointError) for failure, _ in failures.values())
    return str(caught.value)


@FORCED
def test_an_object_is_refused_until_it_is_allowed_by_its_name(saved, monkeypatch):
    saved.save(Schedule(100))
    said = refusal(saved)
    assert f"it holds {NAME}; to allow that, set safe_globals: [{NAME}]" in said
    assert "intact: Unsupported global" in said
    assert saved.load(safe_globals=[NAME]).warmup == 100
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert saved.load().warmup == 100
    assert NAME in refusal(saved, safe_globals=["collections.Counter"]), "another name does not do"
    for name in ("no.such.Thing", f"{Schedule.__module__}.Missing", f"{NAME}.Missing"):
        with pytest.raises((ConfigError, CheckpointException), match="can't be imported"):
            saved.load(safe_globals=[name])


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda _: b"", lambda _: b"<html>Denied</html>"]
)
def test_what_no_manifest_verifies_is_not_called_intact(damage, tmp_path, memory_dir):
    """A file that another tool wrote, and that a copy has cut off, or a server's page in its place."""
    path = tmp_path / "other.ckpt"
    torch.save({"w": torch.arange(4.0), "held": Schedule(3)}, path)
    io = TieredCheckpointIO(dirpath=str(tmp_path / "durable"), memory_dir=memory_dir)
    with pytest.raises(RestoreError) as refused:
        io.load_checkpoint(str(path))
    assert "other.ckpt, which has no manifest to verify it by: Unsupported global" in str(refused.value)
    assert f"it holds {NAME}; to allow that, set safe_globals: [{NAME}]" in str(refused.value)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RestoreError) as refused:
        io.load_checkpoint(str(path))
    io.teardown()
    said = str(refused.value)
    assert "intact" not in said
    assert "step=" not in said
    assert "by:  [" not in said, "the reason is named"
    assert "it may be cut off, or no file of torch.save" in said


@FORCED
def test_what_would_run_code_runs_none(saved, tmp_path, monkeypatch):
    witness = tmp_path / "ran"
    saved.save(Intruder(witness))
    assert "it holds posix.mkdir, which no list can allow" in refusal(saved)
    assert "posix.mkdir" in refusal(saved, safe_globals=["posix.mkdir"])
    assert not witness.exists()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    saved.load()
    assert witness.exists(), "who trusts it wholly gets what they asked for"


def test_a_planner_of_the_users_own_reads_its_bytes_itself(tmp_path, memory_dir):
    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            held[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    held = {}
    saved = Saved("sharded", tmp_path / "durable", memory_dir)
    saved.save(Schedule(7))
    build(ours.load, {"w": torch.zeros(4), "held": None}, planner=Planner(), **saved.options).close()
    assert held["held"].warmup == 7
