"""Checkpoints that release 0.1.0 wrote, in storage format 1, load for ever: of each kind, from each tier.

What the fixtures hold, and how they were made, is described in ``data/format_v1/make.py``.
"""

import shutil
from pathlib import Path

import pytest
import torch
from support.format_v1 import put_in_place
from support.launch import launch
from support.restoring import flip
from support.supporting import build, supported

from tiered_checkpoint_io import TieredCheckpointIO, dcp
from tiered_checkpoint_io.errors import CheckpointNotFoundError

from .kinds import SelectingReader

WORKER = Path(__file__).with_name("format_v1_worker.py")
KINDS = ["full", "sharded", "local"]
#: Where a name leads in each tier: the overwrite of step 1 by step 4 was stopped in the durable one. Its files are in
#: place but for the last one, so that step 1 is still there, and the newest is step 3.
EXPECTED = {
    "memory": {"step_1.ckpt": 4, "step_3.ckpt": 3, None: 4},
    "durable": {"step_1.ckpt": 1, "step_2.ckpt": 2, "step_3.ckpt": 3, "last.ckpt": 3, None: 3},
}
#: Some of its parts are on the durable tier.
HALF = "step_5.ckpt"


def load_full(options, names):
    io = build(TieredCheckpointIO, **options)
    try:
        for name in names:
            state = io.load_checkpoint(name or "tiered:latest")
            assert torch.equal(state["w"], torch.full((4,), float(state["global_step"])))
            yield state["global_step"]
        io.checkpointer.session.wait()
    finally:
        io.teardown()


def load_sharded(options, names):
    for name in names:
        state = {"w": torch.zeros(4), "step": 0}
        try:
            reader = dcp.load(state, checkpoint_id=name, **options)
        except CheckpointNotFoundError as error:
            yield type(error).__name__
            continue
        assert torch.equal(state["w"], torch.full((4,), float(state["step"])))
        yield state["step"]
    reader.session.wait()
    reader.close()


def load_local(options, names, tmp_path):
    jobs = [{"names": names, "options": options}] * 2
    for mine, other in zip(*launch(tmp_path, jobs, deadline_s=60, worker=WORKER), strict=True):
        if isinstance(mine, list):
            values, step, shard = mine
            assert (values, shard) == ([float(step)] * 2, 0)
            assert other == [values, step, 1]
            yield step
        else:
            assert mine == other
            yield mine


def loaded(kind, options, names, tmp_path):
    if kind == "local":
        return list(load_local(options, names, tmp_path))
    return list((load_full if kind == "full" else load_sharded)(options, names))


@pytest.fixture(params=KINDS)
def old(request, tmp_path, memory_dir):
    """A kind, and the options of a job that has its fixtures in both tiers."""
    put_in_place(request.param, tmp_path / "durable", memory_dir)
    with supported(drain="thread", wait_timeout_s=60):
        yield (
            request.param,
            {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "on_save_error": "raise"},
        )


def forget_memory(memory_dir):
    for each in Path(memory_dir).iterdir():
        shutil.rmtree(each)


@pytest.mark.parametrize("tier", EXPECTED)
def test_each_checkpoint_loads_by_name_and_as_the_newest_from_each_tier(old, tier, tmp_path, memory_dir):
    kind, options = old
    expected = dict(EXPECTED[tier])
    if tier == "durable":
        forget_memory(memory_dir)
    else:
        for path in (tmp_path / "durable").rglob("*"):
            if path.is_file() and ".tiered" not in path.parts:
                # A reader sees that it is damaged.
                flip(path, at=path.stat().st_size // 2)
    assert dict(zip(expected, loaded(kind, options, list(expected), tmp_path), strict=True)) == expected


def test_parts_without_a_manifest_are_no_checkpoint(old, tmp_path, memory_dir):
    kind, options = old
    if kind == "full":
        pytest.skip("a full checkpoint has one part, which is described by its manifest")
    forget_memory(memory_dir)
    assert list((tmp_path / "durable" / ".tiered" / "parts").rglob("rank-*.json")), "some have arrived"
    assert loaded(kind, options, [HALF, None], tmp_path) == ["CheckpointNotFoundError", 3]


def test_an_overwrite_that_the_old_release_left_is_brought_to_its_end(old, tmp_path, memory_dir):
    kind, options = old
    assert loaded(kind, options, [None], tmp_path) == [4]
    forget_memory(memory_dir)
    expected = {**EXPECTED["durable"], "step_1.ckpt": 4, None: 4}
    assert dict(zip(expected, loaded(kind, options, list(expected), tmp_path), strict=True)) == expected


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_alias_is_the_last(kind, tmp_path, memory_dir):
    put_in_place(kind, tmp_path / "durable", memory_dir)
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "drain": "thread"}
    for forget in (False, True):
        if forget:
            forget_memory(memory_dir)
        if kind == "full":
            assert list(load_full(options, ["tiered:last"])) == [3]
            continue
        reader = build(SelectingReader, "tiered:last", **options)
        state = {"w": torch.zeros(4), "step": 0}
        dcp.load(state, storage_reader=reader)
        reader.close()
        assert state["step"] == 3
