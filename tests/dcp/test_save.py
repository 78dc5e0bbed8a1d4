"""Sharded saves by real ranks over gloo, which plain DCP reads; and loads from memory, durable tier, other sizes."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from support.losing import lose_memory
from support.restoring import SMALL, flip

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import hash_bytes

from .conftest import failures
from .worker_states import content

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def gathered(memory_dir, name, folder):
    """Returns all files of a checkpoint in memory, in one folder, as they would lie on the durable tier."""
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
    """Returns True if plain DCP, on one process, reads the state of ``seed`` from a folder."""
    whole = content(seed)
    state = {"model": {key: torch.zeros_like(value) for key, value in whole.items()}, "step": 0, "text": {"name": ""}}
    stock.load(state, storage_reader=stock.FileSystemReader(folder))
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


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_rank_that_fails_fails_all_and_leaves_no_checkpoint(ranks, memory_dir, tmp_path, broken):
    """Also if DCP keeps the plan of the save before."""
    cached = {"cached": True}
    saves = [["save", seed, {**cached, **({"broken": broken} if seed == 3 else {})}] for seed in (1, 2, 3, 4)]
    for answer in ranks(2, *saves, memory_keep_last=4):
        assert [step.get("error") for step in answer] == [None, None, "CheckpointException", None]
        assert "memory is gone" in answer[2]["message"]
        by_name = {}
        for name, rank, save_id, _, _ in answer[3]["got"]:
            by_name.setdefault(name, {})[rank] = save_id
        whole = {name for name, of_rank in by_name.items() if len(of_rank) == 2 and len({*of_rank.values()}) == 1}
        committed = {part[0] for part in answer[3]["got"] if ".metadata" in part[4]}
        assert whole == committed == {"step_1", "step_2", "step_4"}
    others = [("step_3", "save", "another rank failed")] if broken else []
    assert failures(memory_dir) == [*others, ("step_3", "save", "this rank's memory")]
    for seed in (1, 2, 4):
        assert plain(gathered(memory_dir, f"step_{seed}", tmp_path / f"read{seed}"), seed)


def test_a_save_that_the_coordinator_refuses_does_no_harm_to_later_ones(ranks):
    """The coordinator has then planned for all ranks, which never get the plan; the next state may have grown."""
    grown, refused = [0, 0, 2, 2, 0, 0], [0, 2, 4]
    steps = [["save_grown", n, {"grown": more, "refuses": n in refused}] for n, more in enumerate(grown)]
    for answer in ranks(2, *steps, ["load_grown", len(grown) - 1]):
        *saved, loaded = [step.get("got", step) for step in answer]
        assert saved == [n not in refused for n in range(len(grown))]
        assert (loaded["name"], loaded["same"]) == (f"step_{len(grown) - 1}", True)


@pytest.mark.parametrize("refuses", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_an_object_that_refuses_its_state_on_a_rank_fails_the_save_or_load_on_all(ranks, refuses):
    """The other ranks do not wait for the failed one, and its next call does not meet this call of theirs."""
    refusing, loads = {"refuses": refuses}, {"loads": True}
    saves = [
        [1],
        [2, refusing],
        [3, {**refusing, "background": True}],
        [4],
        [5, {**refusing, "on_save_error": "raise"}],
    ]
    calls = [*saves, [4, {**refusing, **loads}], [4, loads], [6]]
    for answer in ranks(2, *(["save_stateful", *call] for call in calls)):
        outcomes = [step.get("got", step.get("error")) for step in answer]
        assert outcomes == [True, False, False, True, "SaveError", "RestoreError", True, True]
        assert all("this rank's loader has ended" in answer[failed]["message"] for failed in (4, 5))
        assert max(step["seconds"] for step in answer) < 30


def test_a_rank_that_fails_behind_a_save_fails_the_next_on_all_ranks(ranks, memory_dir, tmp_path):
    saves = [["save_behind", seed, {"fails": {2: 1, 5: 0}.get(seed)}] for seed in range(1, 8)]
    answers = ranks(2, *saves, ["load", 7], on_save_error="raise", memory_keep_last=1)
    for rank, answer in enumerate(answers):
        ended = [step["got"]["ended"] if "got" in step else step["error"] for step in answer[:7]]
        assert ended[0] == ended[3] == ended[6] == "None"
        assert ["memory is gone" in ended[failed] for failed in (1, 4)] == [rank == 1, rank == 0]
        for shown, whole in ((2, {"step_1", "step_4"}), (5, {"step_4", "step_7"})):
            assert ended[shown] == "SaveError"
            assert "not completed in memory" in answer[shown]["message"]
            held = {part[0] for part in answer[shown + 1]["got"]["parts"]}
            assert held >= whole, "the last whole one is kept"
        assert answer[7]["got"]["matches"]
    assert failures(memory_dir) == [(f"step_{seed}", "save", "the last save") for seed in (2, 5)]
    assert plain(gathered(memory_dir, "step_7", tmp_path / "read"), 7)


def test_ranks_that_save_to_different_places_get_an_error(ranks, tmp_path):
    """Each rank makes a dirpath from the time by itself: their parts would never be one checkpoint."""
    here, there = str(tmp_path / "run-10-59"), str(tmp_path / "run-11-00")
    options = {"dirpath": here, "of_rank": {1: {"dirpath": there}}, "save_to_s3": True, "on_save_error": "raise"}
    steps = [["save", 1], ["save_behind", 1], ["save", 2, {"dirpath": here}], ["save_different", 3, {"dirpath": here}]]
    for answer in ranks(2, *steps, ["save", 5, {"dirpath": here, "world_size": 3}], **options):
        said = [step.get("message", "") for step in answer]
        for message in said[:2]:
            assert f"this rank saves step_1 to {there}, the coordinator to {here}" in message
            assert "give all ranks the same dirpath" in message
        assert "got" in answer[2], answer[2]
        assert "give all ranks the same checkpoint_id" in said[3]
        assert "world_size is 3, but 2 ranks save together" in said[4]
    assert not Path(there, ids.manifest_key("step_1")).exists()


def test_any_number_of_ranks_loads_what_any_number_saved(ranks):
    answers = ranks(4, ["reshard"], save_to_s3=True)
    for rank, answer in enumerate(answers):
        expected = [[saved, loaded] for saved in (1, 2, 3, 4) for loaded in (1, 2, 3, 4) if rank < loaded]
        assert answer[0].get("got") == expected, answer[0].get("message")


def test_what_grows_with_tensors_and_ranks_goes_to_no_rank_from_all_others(ranks, memory_dir):
    """Each rank would hold as many copies as there are ranks."""
    ranks(3, ["save_grown", 1, 200], ["close"], nodes="aab")
    (path,) = Path(memory_dir, "a").glob("tiered-*/*/saves/*/rank-00000/.metadata*")
    assert path.stat().st_size > 20 * SMALL
    for answer in ranks(3, ["load_grown", 1, 200], nodes="aab"):
        got = answer[0].get("got", answer[0])
        assert got["same"]
        assert got["gathered"] <= SMALL
        assert not got["kept"]


def test_three_ranks_read_each_byte_of_four_once_and_list_twice(ranks, s3_url, memory_dir):
    """Each rank reads one file by itself, or most of it, and shares other files."""
    ranks(4, ["save", 3, {"rows": 120_000}], ["close"], dirpath=s3_url, save_to_s3=True)
    lose_memory(memory_dir)
    os.mkdir(memory_dir)
    answers = ranks(3, ["load", 3, {"rows": 120_000}], dirpath=s3_url)
    asked = [answer[0]["got"]["asked"] for answer in answers]
    assert all(answer[0]["got"]["matches"] for answer in answers)
    size = 120_000 * 24 * 4
    assert sum(each["bytes.down"] for each in asked) <= 1.05 * size
    assert sum(each.get("requests.list", 0) for each in asked) == 2


def test_damage_that_one_of_two_ranks_of_a_node_finds_leads_to_the_durable_copy(ranks, memory_dir):
    """The other one still holds that file: it needs no byte of the chunk that is damaged."""
    rows = {"rows": 540_000}
    ranks(3, ["save", 1, rows], ["wait"], ["close"], nodes="aab", save_to_s3=True)
    (path,) = Path(memory_dir, "a").glob("tiered-*/*/saves/*/rank-00001/__1_0-*.distcp")
    flip(path, at=10 << 20)
    for answer in ranks(3, ["load", 1, rows], nodes="aab"):
        assert answer[0].get("got", answer[0])["matches"]
    assert list(Path(memory_dir, "a").glob("tiered-*/*/quarantine/*rank-00001.*/reason.txt"))


def test_an_optimizer_that_has_made_no_step_does_not_lose_its_state_without_a_word(tmp_path, memory_dir, caplog):
    def made():
        model = torch.nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "save_to_s3": False}
    options["logger"] = logging.getLogger("mine")
    saved = made()
    saved["model"](torch.ones(3)).sum().backward()
    saved["optimizer"].step()
    dcp.save(saved, checkpoint_id="step_1", **options)
    dcp.load(saved, **options)
    dcp.load(made(), **options).close()
    # One, of the load that there was nothing to load into for.
    (warning,) = [each.getMessage() for each in caplog.records if each.name == "mine" and each.levelname == "WARNING"]
    assert warning.startswith("optimizer.state is empty in the state to load into, so what step_1 holds of it is not")
