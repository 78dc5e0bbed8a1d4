"""Sharded checkpoints read back by real ranks: from memory, from the durable tier, by other world sizes."""

import logging
import os
from pathlib import Path

import pytest
import torch
from support.losing import lose_memory
from support.restoring import SMALL, flip

from tiered_checkpoint_io import dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_any_number_of_ranks_loads_what_any_number_saved(ranks):
    answers = ranks(4, ["reshard"], save_to_s3=True)
    for rank, answer in enumerate(answers):
        expected = [[saved, loaded] for saved in (1, 2, 3, 4) for loaded in (1, 2, 3, 4) if rank < loaded]
        assert answer[0].get("got") == expected, answer[0].get("message")


def test_a_job_goes_on_from_memory_after_all_its_processes_died(ranks):
    ranks(4, ["save", 1], ["save", 2])
    for answer in ranks(4, ["load", 2], ["load", 1, {"step": 1}], ["load", 1, "step_1"]):
        assert [each["got"]["matches"] for each in answer] == [True] * 3
        assert answer[0]["got"]["asked"].get("bytes.down", 0) == 0


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


def test_an_fsdp2_model_and_its_optimizer_go_on_with_fewer_ranks(ranks):
    saved = ranks(3, ["fsdp_save", 4])[0][0]["got"]
    assert any("exp_avg" in key for key in saved)
    for answer in ranks(2, ["fsdp_load", 4]):
        assert answer[0].get("got", answer[0]) == pytest.approx(saved)


def test_three_ranks_read_each_byte_of_four_once_and_list_once(ranks, s3_url, memory_dir):
    """Each rank reads one file by itself, or most of it, and shares other files."""
    ranks(4, ["save", 3, {"rows": 120_000}], ["close"], dirpath=s3_url, save_to_s3=True)
    lose_memory(memory_dir)
    os.mkdir(memory_dir)
    answers = ranks(3, ["load", 3, {"rows": 120_000}], dirpath=s3_url)
    asked = [answer[0]["got"]["asked"] for answer in answers]
    assert all(answer[0]["got"]["matches"] for answer in answers)
    size = 120_000 * 24 * 4
    assert sum(each["bytes.down"] for each in asked) <= 1.05 * size
    assert sum(each.get("requests.list", 0) for each in asked) == 1


def test_what_another_node_sends_is_verified(ranks, memory_dir):
    ranks(2, ["save", 1], ["save", 2], nodes="ab")
    (path,) = Path(memory_dir, "a").glob("tiered-*/*/saves/*-00000002/rank-00000/__0_0-*.distcp")
    flip(path, at=path.stat().st_size - 200)
    for answer in ranks(2, ["load", 1, {"ours": True}], nodes="ab"):
        assert answer[0].get("got", answer[0])["matches"]
        assert answer[0]["got"]["name"] == "step_1"


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
