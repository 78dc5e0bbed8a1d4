"""Sharded saves by real ranks over gloo; plain DCP reads what lies in memory."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.stores import open_store

from .conftest import failures
from .worker_states import content

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def gathered(memory_dir, name, folder):
    """All files of a checkpoint in memory, in one folder, as they would lie on the durable tier."""
    folder.mkdir()
    (root,) = Path(memory_dir).glob("tiered-*/*")
    tier = MemoryTier(root)
    for stored in tier.parts():
        if stored.part.name == name:
            for entry in stored.part.content.files:
                (folder / entry.basename).write_bytes(stored.file(entry.basename).read_bytes())
    tier.close()
    return folder


def plain(folder, seed):
    """Whether plain DCP, on one process, reads the state of ``seed`` from a folder."""
    whole = content(seed)
    state = {"model": {key: torch.zeros_like(value) for key, value in whole.items()}, "step": 0, "text": {"name": ""}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    assert state["step"] == seed
    assert state["text"] == {"name": f"run {seed}"}
    return all(torch.equal(state["model"][key], value) for key, value in whole.items())


def test_four_ranks_save_what_plain_dcp_reads(ranks, memory_dir, tmp_path):
    answers = ranks(4, ["save", 5])
    parts = answers[0][0]["got"]
    assert [part[1] for part in parts] == [0, 1, 2, 3]
    assert len({part[2] for part in parts}) == 1, "one save id"
    mark = hash_bytes(parts[0][2].encode())[:8]
    shards = [f"__{rank}_0-{mark}.distcp" for rank in range(4)]
    assert [part[4] for part in parts] == [[".metadata", shards[0]], *([shard] for shard in shards[1:])]
    assert plain(gathered(memory_dir, "step_5", tmp_path / "read"), 5)


@pytest.mark.matrix
def test_ranks_agree_on_each_save_with_plan_caching_though_some_saves_fail(ranks, memory_dir, tmp_path):
    answers = ranks(
        2,
        ["save", 1, {"cached": True}],
        ["save", 2, {"cached": True}],
        ["save", 3, {"cached": True, "broken": 1}],
        ["save", 4, {"cached": True}],
        memory_keep_last=4,
    )
    for answer in answers:
        assert [("error" in each) for each in answer] == [False, False, True, False]
        by_name = {}
        for name, rank, save_id, _, _ in answer[3]["got"]:
            by_name.setdefault(name, {})[rank] = save_id
        assert sorted(by_name) == ["step_1", "step_2", "step_4"]
        assert all(len(of_rank) == 2 and len(set(of_rank.values())) == 1 for of_rank in by_name.values())
    for seed in (1, 2, 4):
        assert plain(gathered(memory_dir, f"step_{seed}", tmp_path / f"read{seed}"), seed)


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_rank_that_fails_fails_all_and_leaves_no_checkpoint(ranks, memory_dir, tmp_path, broken):
    answers = ranks(2, ["save", 1], ["save", 2, {"broken": broken}], ["save", 3])
    for answer in answers:
        assert answer[1]["error"] == "CheckpointException"
        assert "memory is gone" in answer[1]["message"]
        committed = {part[0] for part in answer[2]["got"] if ".metadata" in part[4]}
        assert committed == {"step_1", "step_3"}
    others = [("step_2", "save", "another rank failed")] if broken else []
    assert failures(memory_dir) == [*others, ("step_2", "save", "this rank's memory")]
    assert plain(gathered(memory_dir, "step_1", tmp_path / "read"), 1)


@pytest.mark.parametrize(
    ("before", "refused", "after"),
    [([], 0, 0), ([0], 2, 2), pytest.param([0], 2, 0, marks=pytest.mark.matrix)],
    ids=["first", "grown", "back as it was"],
)
def test_a_save_that_the_coordinator_refuses_does_no_harm_to_later_ones(ranks, before, refused, after):
    """By then it has planned for all ranks, which never get that plan."""
    saves = [*before, refused, after, after]
    steps = [["save_grown", n, {"grown": grown, "refuses": n == len(before)}] for n, grown in enumerate(saves)]
    newest = len(saves) - 1
    for answer in ranks(2, *steps, ["load_grown", newest, {"grown": after}]):
        *saved, loaded = [step.get("got", step) for step in answer]
        assert saved == [n != len(before) for n in range(len(saves))]
        assert (loaded["name"], loaded["same"]) == (f"step_{newest}", True)


def test_a_rank_that_nests_its_state_in_another_way_is_saved_so(ranks):
    """Under the names that its tensors had before."""
    nesting = [[], [], [1], [1], [1], [0], []]
    wanted = [[[f"rank{r}", "t"] if r in nests else [f"rank{r}.t"] for r in range(2)] for nests in nesting]
    for answer in ranks(2, *(["save_nested", number, nests] for number, nests in enumerate(nesting))):
        assert [sorted(step["got"], key="".join) for step in answer] == wanted


@pytest.mark.parametrize("refuses", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_an_object_that_refuses_its_state_on_a_rank_fails_the_save_on_all(ranks, memory_dir, tmp_path, refuses):
    """The others do not wait for a rank that never comes to save."""
    saves = [[1], [2, {"refuses": refuses}], [3, {"refuses": refuses, "background": True}], [4]]
    raising = ["save_stateful", 5, {"refuses": refuses, "on_save_error": "raise"}]
    for answer in ranks(2, *(["save_stateful", *save] for save in saves), raising, ["save", 6]):
        assert [step.get("got", step) for step in answer[:4]] == [True, False, False, True]
        assert answer[4]["error"] == "SaveError"
        assert "this rank's loader has ended" in answer[4]["message"]
        assert "got" in answer[5], answer[5]
        assert max(step["seconds"] for step in answer) < 30
    assert plain(gathered(memory_dir, "step_6", tmp_path / "read"), 6)


def test_an_object_that_refuses_its_state_on_a_rank_fails_the_load_on_all(ranks):
    """And the next load of that rank does not meet this one of the others."""
    loads = {"loads": True}
    steps = [["save_stateful", 1], ["save_stateful", 1, {"refuses": 1, **loads}], ["save_stateful", 1, loads]]
    for saved, refused, loaded in ranks(2, *steps):
        assert saved["got"]
        assert refused["error"] == "RestoreError"
        assert "this rank's loader has ended" in refused["message"]
        assert loaded.get("got"), loaded


@pytest.mark.parametrize("durable", [pytest.param(False, marks=pytest.mark.matrix), True], ids=["memory", "durable"])
def test_a_rank_that_dies_before_the_commit_leaves_the_checkpoint_before_the_newest(ranks, durable):
    options = {"save_to_s3": durable, "wait": durable}
    answers = ranks(2, ["save", 1], ["save_and_die", 2, 1], **options)
    assert answers[1] is None
    assert "error" in answers[0][1]
    assert answers[0][1]["seconds"] < 30
    for answer in ranks(2, ["load", 1], **options):
        assert answer[0].get("got", answer[0])["name"] == "step_1"
        assert answer[0]["got"]["matches"]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_rank_that_fails_behind_a_save_fails_the_next_on_all_ranks(ranks, memory_dir, tmp_path, rank):
    steps = [["save_behind", 1], ["save_behind", 2, {"fails": rank}], ["save_behind", 3], ["save_behind", 4]]
    answers = ranks(2, *steps, ["load", 4], on_save_error="raise", memory_keep_last=1)
    for each, answer in enumerate(answers):
        ended = [step["got"]["ended"] if "got" in step else step["error"] for step in answer[:4]]
        assert ended[0] == ended[3] == "None"
        assert ("memory is gone" in ended[1]) == (each == rank)
        assert ended[2] == "SaveError"
        assert "not completed in memory" in answer[2]["message"]
        assert {part[0] for part in answer[3]["got"]["parts"]} >= {"step_1", "step_4"}, "step_1 was the last whole one"
        assert answer[4]["got"]["matches"]
    assert failures(memory_dir) == [("step_2", "save", "the last save")]
    assert plain(gathered(memory_dir, "step_4", tmp_path / "read"), 4)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_rank_killed_behind_a_save_leaves_the_checkpoint_before(ranks, rank):
    answers = ranks(2, ["save_behind", 1], ["save_behind", 2], ["save_behind", 3, {"dies": rank}], memory_keep_last=1)
    assert answers[rank] is None
    for answer in ranks(2, ["load", 2]):
        assert answer[0].get("got", answer[0])["name"] == "step_2"
        assert answer[0]["got"]["matches"]


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.matrix)])
def test_async_saves_reach_the_durable_tier(ranks, tmp_path, kind):
    answers = ranks(2, ["save_async", 3, kind], save_to_s3=True)
    assert all("error" not in answer[0] for answer in answers), answers
    assert plain(tmp_path / "durable" / "step_3", 3)


def test_two_nodes_commit_one_durable_checkpoint(ranks, memory_dir, tmp_path):
    ranks(2, ["save", 3, {"wait": True}], ["close"], nodes="ab", save_to_s3=True)
    assert plain(tmp_path / "durable" / "step_3", 3)


@pytest.mark.matrix
def test_a_node_that_cannot_reach_s3_leaves_no_checkpoint_there(ranks, memory_dir, s3_url):
    ranks(2, ["save", 1], ["close"], nodes="ab", dirpath=s3_url, save_to_s3=True)
    nowhere = {1: {"endpoint_url": "http://127.0.0.1:9"}}
    try:
        left = {"nodes": "ab", "of_rank": nowhere, "dirpath": s3_url, "save_to_s3": True}
        answers = ranks(2, ["save", 2, {"wait": False}], ["wait", 5], **left)
        assert all("error" not in answer[0] for answer in answers), "training goes on"
        assert all(answer[1]["got"] for answer in answers), "both are told that it is not durable"
    finally:
        for status in Path(memory_dir).glob("*/tiered-*/*/status/drain.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)
    store = open_store(TieredCheckpointConfig(dirpath=s3_url))
    assert [entry.key for entry in store.list(ids.MANIFEST_PREFIX)] == [ids.manifest_key("step_1")]
    store.close()
    # Memory still has it whole, while that node is as it was.
    for answer in ranks(2, ["load", 2], **left):
        assert answer[0].get("got", answer[0])["matches"]


@pytest.mark.matrix
def test_memory_keeps_as_many_checkpoints_as_it_is_told(ranks):
    answers = ranks(2, *(["save", seed] for seed in range(1, 6)), memory_keep_last=2)
    parts = answers[0][-1]["got"]
    assert [(part[0], part[1]) for part in parts] == [("step_4", 0), ("step_4", 1), ("step_5", 0), ("step_5", 1)]


def test_async_save_in_a_thread_saves_what_was_there_at_the_call(ranks, memory_dir, tmp_path):
    ranks(2, ["save_async", 3, "thread"], ["save_async", 4, "thread"])
    for seed in (3, 4):
        assert plain(gathered(memory_dir, f"step_{seed}", tmp_path / f"read{seed}"), seed)


@pytest.mark.matrix
def test_async_save_in_a_process_of_its_own(ranks, memory_dir, tmp_path):
    ranks(2, ["save_async", 3, "process"], ["save_async", 4, "process"])
    for seed in (3, 4):
        assert plain(gathered(memory_dir, f"step_{seed}", tmp_path / f"read{seed}"), seed)


def test_a_process_group_saves_on_its_own(ranks):
    answers = ranks(3, ["group_save", 7, [1, 2]])
    assert answers[0][0]["got"] is None
    assert [(part[0], part[1]) for part in answers[1][0]["got"]] in ([("step_7", 0), ("step_7", 1)], [("step_7", 0)])


def test_ranks_that_mean_different_checkpoints_are_told(ranks):
    for answer in ranks(2, ["save_different", 1]):
        assert "give all ranks the same checkpoint_id" in answer[0]["message"]


@pytest.mark.parametrize("step", ["save", "save_behind"])
def test_ranks_that_mean_different_durable_tiers_are_told(ranks, tmp_path, step):
    """As where each makes a dirpath of the time by itself: their parts would never be one checkpoint."""
    here, there = str(tmp_path / "run-10-59"), str(tmp_path / "run-11-00")
    options = {"dirpath": here, "of_rank": {1: {"dirpath": there}}, "save_to_s3": True, "on_save_error": "raise"}
    answers = ranks(2, [step, 1], ["save", 2, {"dirpath": here}], **options)
    for answer in answers:
        said = answer[0].get("message", answer[0])
        assert f"this rank saves step_1 to {there}, the coordinator to {here}" in said
        assert "give all ranks the same dirpath" in said
        assert "got" in answer[1], answer[1]
    assert not Path(there, ids.manifest_key("step_1")).exists()


def test_a_wrong_world_size_is_refused_on_all_ranks(ranks):
    for answer in ranks(2, ["save", 1], world_size=3):
        assert "world_size is 3, but 2 ranks save together" in answer[0]["message"]
