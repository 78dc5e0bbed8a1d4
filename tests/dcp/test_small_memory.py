"""Ranks whose node memory has no room for their shards: these are spilled, or else the save fails on all ranks."""

import contextlib
import re

import pytest
from support.tenants import mounted_tmpfs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MIB = 1 << 20
#: About 11.5 MiB in all.
LARGE = {"rows": 120_000}


@pytest.fixture
def small(memory_dir, tmp_path):
    """Makes a node of the simulated ones a real tmpfs of 5 MiB, 2 of which the operation log takes."""
    with contextlib.ExitStack() as stack:
        yield lambda node: stack.enter_context(mounted_tmpfs(f"{memory_dir}/{node}", 5 * MIB))


def test_a_durable_save_that_neither_memory_nor_a_spill_has_room_for_fails_on_all_ranks(ranks, small):
    small("b")
    answers = ranks(
        2,
        ["save", 1, {"wait": True}],
        ["save", 2, LARGE],
        ["save_behind", 3, LARGE],
        ["wait"],
        ["save", 4, {"wait": True}],
        ["load", 4],
        ["load", 1, {"step": 1}],
        nodes="ab",
        save_to_s3=True,
        on_save_error="raise",
        spill_dir=None,
    )
    for first, failed, behind, _, *rest in answers:
        assert "error" not in first
        for text in (failed["message"], behind["message"]):
            assert re.search(r"does not fit: .* the node's free memory allow [0-9]+.*name a spill_dir", text), text
        assert [step.get("error") for step in rest] == [None] * 3, [step.get("message") for step in rest]
        assert [step["got"]["matches"] for step in rest[1:]] == [True, True]


def test_where_one_node_has_no_room_the_others_keep_no_more_than_they_are_told(ranks, small):
    """Saves that will never be whole in memory are of no use to the other nodes."""
    small("a")
    steps = [["save", 1], *(["save", seed, LARGE] for seed in range(2, 8))]
    answers = ranks(2, *steps, ["load", 1], nodes="ab", spill_dir=None)
    for name, (*saved, loaded) in zip("ab", answers, strict=True):
        assert [step.get("error") for step in saved] == [None] * 7, [step.get("message") for step in saved]
        held = [sorted({name for name, *_ in step["got"]}) for step in saved[1:]]
        if name == "a":
            assert held == [["step_1"]] * 6
        else:
            # The last that is whole in memory, and the two that may yet be so as far as this rank knows.
            assert held[-1] == ["step_1", "step_6", "step_7"]
        assert loaded["got"]["matches"], loaded
