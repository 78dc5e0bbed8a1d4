"""Local checkpoints of ranks whose node memory has no room for them: these are spilled, or else the save fails."""

import re

import pytest
import torch
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

from .test_local import got, job  # noqa: F401
from .test_small_memory import small  # noqa: F401

#: Some 4 MB a shard, on nodes of 3 MiB.
LARGE = {"large": 1_000_000}
MEMORY = {"save_to_s3": False}


def names_of(parts):
    return sorted({name for name, *_ in parts})


@pytest.mark.parametrize(
    "nodes",
    ["a", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("b", "ab"))],
    ids=["shard 0", "other shard", "both"],
)
def test_a_durable_save_that_memory_has_no_room_for(job, small, request, tmp_path, nodes):  # noqa: F811
    # One of them by a real S3 server, whose client takes long to import.
    dirpath = request.getfixturevalue("s3_url") if nodes == "a" else str(tmp_path / "durable")
    for node in nodes:
        small(node)
    options = {"nodes": "ab", "dirpath": dirpath, "wait_timeout_s": 60, "on_save_error": "raise"}
    first, _, waited, _, nowhere, _, behind, _, held, newest, named = job(
        2,
        ["save_local", 1, MEMORY],
        ["meet"],
        ["save_local", 2, {**LARGE, "sync": True}],
        ["meet"],
        ["save_local", 3, {**LARGE, **MEMORY}],
        # What waits for the durable tier stays in memory until it is there.
        ["wait"],
        ["save_local", 4, LARGE],
        ["meet"],
        ["parts"],
        ["load_local", 4, LARGE],
        ["load_local", 2, {**LARGE, "checkpoint_id": "step_2"}],
        **options,
    )
    assert [answer["tiers"] for answer in got(first)] == [["memory"]] * 2
    for node, two, three, four, parts in zip("ab", got(waited), got(nowhere), got(behind), got(held), strict=True):
        assert two["tiers"] == four["tiers"] == ["durable", "memory"]
        assert four["ended"] == ["step_4"]
        assert (two["calls"], four["calls"]) == ([], [])
        assert three["saved"] == (node not in nodes), "of memory alone, it is skipped where there is no room"
        # What is complete on all nodes is kept, whoever has no part of later ones.
        assert names_of(parts) == ["step_2", *([] if node in nodes else ["step_3"]), "step_4"]
    assert [(answer["same"], answer["step"], answer["rejected"]) for answer in got(newest)] == [(True, 4, [])] * 2
    assert [answer["same"] for answer in got(named)] == [True, True]

    # A restart finds the newest, and the one before it, whatever memory has; and so do nodes that lost theirs.
    before = ["load_local", 2, {**LARGE, "checkpoint_id": "step_2"}]
    newest, named = job(2, ["load_local", 4, LARGE], before, **options)
    assert [(answer["same"], answer["step"]) for answer in got(newest)] == [(True, 4)] * 2
    assert [(answer["same"], answer["rejected"]) for answer in got(named)] == [(True, [])] * 2
    (elsewhere,) = job(2, ["load_local", 4, LARGE], **{**options, "nodes": "cd"})
    assert [(answer["same"], answer["step"]) for answer in got(elsewhere)] == [(True, 4)] * 2


@pytest.mark.parametrize("node", ["a", pytest.param("b", marks=pytest.mark.matrix)], ids=["shard 0", "other shard"])
def test_a_durable_save_that_neither_memory_nor_a_spill_has_room_for_fails(job, small, node):  # noqa: F811
    """On that rank at once; on the others when they wait for the checkpoint."""
    small(node)
    first, _, failed, _, after, _, newest, named = job(
        2,
        ["save_local", 1, {"sync": True}],
        ["meet"],
        ["save_local", 2, {**LARGE, "sync": True}],
        ["meet"],
        ["save_local", 3, {"sync": True}],
        ["meet"],
        ["load_local", 3],
        ["load_local", 1, {"checkpoint_id": "step_1"}],
        nodes="ab",
        spill_dir=None,
        on_save_error="raise",
        wait_timeout_s=60,
    )
    got(first)
    for each, answer in zip("ab", failed, strict=True):
        wanted = "does not fit: .*name a spill_dir" if each == node else "a rank has no part of it"
        assert re.search(wanted, answer["message"]), answer
        assert answer["seconds"] < 30
    got(after)
    assert [(answer["same"], answer["step"]) for answer in got(newest)] == [(True, 3)] * 2
    assert [answer["same"] for answer in got(named)] == [True, True]


def test_nothing_goes_for_a_save_that_does_not_fit_all_the_same(memory_dir, tmp_path):
    options = {"dirpath": str(tmp_path / "durable"), "memory_keep_last": 2, "spill_dir": None}
    with mounted_tmpfs(f"{memory_dir}/a", 16 << 20) as folder:
        options["memory_dir"] = str(folder)
        for number in (1, 2):
            dcp.save({"n": number}, checkpoint_id=f"step_{number}", kind="local", save_to_s3=False, **options)
        assert dcp.save({"w": torch.ones(6_000_000)}, checkpoint_id="step_3", kind="local", **options) is None
        tier = MemoryTier.open(options["memory_dir"], ids.namespace_of(options["dirpath"]))
        assert [stored.part.name for stored in tier.parts()] == ["step_1", "step_2"]
        dcp.save({"n": 4}, checkpoint_id="step_4", kind="local", save_to_s3=False, **options)
        assert [stored.part.name for stored in tier.parts()] == ["step_2", "step_4"]
        dcp.TieredStorageWriter(**options).close()
