"""Local checkpoints of ranks whose node memory has no room for them: these are spilled, or else the save fails."""

import re

from .test_local import got, job  # noqa: F401
from .test_small_memory import small  # noqa: F401

#: Some 4 MB a shard, on nodes of 3 MiB.
LARGE = {"large": 1_000_000}
MEMORY = {"save_to_s3": False}


def names_of(parts):
    return sorted({name for name, *_ in parts})


def test_a_durable_save_that_memory_has_no_room_for(job, small, s3_url):  # noqa: F811
    small("a")
    options = {"nodes": "ab", "dirpath": s3_url, "wait_timeout_s": 60, "on_save_error": "raise"}
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
        assert three["saved"] == (node == "b"), "of memory alone, it is skipped where there is no room"
        # What is complete on all nodes is kept, whoever has no part of later ones.
        assert names_of(parts) == ["step_2", *([] if node == "a" else ["step_3"]), "step_4"]
    assert [(answer["same"], answer["step"], answer["rejected"]) for answer in got(newest)] == [(True, 4, [])] * 2
    assert [answer["same"] for answer in got(named)] == [True, True]

    # A restart finds the newest, and the one before it, whatever memory has; and so do nodes that lost theirs.
    before = ["load_local", 2, {**LARGE, "checkpoint_id": "step_2"}]
    newest, named = job(2, ["load_local", 4, LARGE], before, **options)
    assert [(answer["same"], answer["step"]) for answer in got(newest)] == [(True, 4)] * 2
    assert [(answer["same"], answer["rejected"]) for answer in got(named)] == [(True, [])] * 2
    (elsewhere,) = job(2, ["load_local", 4, LARGE], **{**options, "nodes": "cd"})
    assert [(answer["same"], answer["step"]) for answer in got(elsewhere)] == [(True, 4)] * 2


def test_a_durable_save_that_neither_memory_nor_a_spill_has_room_for_fails(job, small):  # noqa: F811
    """On that rank at once; on the others when they wait for the checkpoint."""
    small("b")
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
        wanted = "does not fit: .*name a spill_dir" if each == "b" else "a rank has no part of it"
        assert re.search(wanted, answer["message"]), answer
        assert answer["seconds"] < 30
    got(after)
    assert [(answer["same"], answer["step"]) for answer in got(newest)] == [(True, 3)] * 2
    assert [answer["same"] for answer in got(named)] == [True, True]
