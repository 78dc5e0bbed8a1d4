"""Copies in the memory of peers: what is saved on one node is soon on others, and nothing waits for it."""

import time
from pathlib import Path

import pytest
from support.supporting import supported

from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.memory.node import is_locked
from tiered_checkpoint_io.memory.tier import MemoryTier


def copies(answers, step):
    """Returns, for each rank, the ranks whose parts of a step its node keeps."""
    return [sorted(rank for s, rank, _ in answer["copies"] if s == step) for answer in answers]


def test_each_kind_is_copied_and_of_containers_on_one_machine_to_another(ranks):
    steps = [["save", 1], ["save_local", 2], ["save_by_thread_of_dcp", 3], ["save_full", 4]]
    *sharded, full = ranks("abcd", *steps, machines="aabb", replication_factor=2)
    for step, answers in enumerate(sharded, start=1):
        assert copies(answers, step) == [[2], [3], [0], [1]]
    assert copies(full, 4) == [[], [], [0], []]
    assert all(safe for answer in full for *_, safe in (*answer["own"], *answer["copies"]))


@pytest.mark.matrix
def test_memory_stays_bounded_over_many_saves(ranks):
    *_, last = ranks("ab", *(["save", step] for step in range(1, 7)), replication_factor=2, memory_keep_last=2)
    for answer in last:
        assert [step for step, *_ in answer["own"]] == [5, 6]
        assert [step for step, *_ in answer["copies"]] == [5, 6]


def test_copies_on_the_same_machine_are_refused_on_all_ranks(ranks):
    """Also if each of its containers has a memory of its own, as with Kubernetes' emptyDir."""
    (answers,) = ranks("ab", ["save", 1], machines="aa", replication_factor=2)
    assert [answer["error"] for answer in answers] == ["ConfigError"] * 2
    assert all("same machine" in answer["message"] for answer in answers)


def test_each_group_s_newest_is_copied_by_its_own_ranks_where_groups_save_side_by_side(ranks):
    """Each node has a part of rank 0, or of rank 1, of both groups."""
    stages = [[0, 1], [2, 3]]
    ranks("abab", ["save_local", 1, stages], ["close"], replication_factor=1)
    (answers, _) = ranks("abab", ["save_local", 3, stages], ["close"], replication_factor=2)
    for rank, answer in enumerate(answers):
        newest = [copy for copy in sorted(answer["copies"]) if copy[0] > 2]
        assert newest == [[step, 1 - rank % 2, True] for step in (3, 4)], answer


def test_drains_replicate_after_all_trainers_have_died(ranks, memory_dir):
    with supported(drain="process"):
        ranks("ab", ["save", 1], ["save_and_die", 2], dead=[0, 1], replication_factor=2)
    tiers = [MemoryTier(next(Path(memory_dir, node).glob("tiered-*/*"))) for node in "ab"]
    deadline = time.monotonic() + 20
    while not all(tier.held()[-1].replicated and tier.parts()[-1].replicated for tier in tiers):
        assert time.monotonic() < deadline, [tier.held() for tier in tiers]
        time.sleep(0.02)
    for rank, tier in enumerate(tiers):
        assert {(each.part.content.step, each.part.rank) for each in tier.replicas.parts()} >= {(2, 1 - rank)}
        while is_locked(tier.root / LOCK_FILE):
            assert time.monotonic() < deadline, "a drain stays though there is nothing to do"
            time.sleep(0.02)


@pytest.mark.matrix
def test_closing_at_once_still_sends_what_was_saved(ranks):
    saves = [["save", step, {"settles": False}] for step in (1, 2)]
    *_, seconds = ranks("ab", *saves, ["close"], replication_factor=2)
    assert max(seconds) < 20
    (answers,) = ranks("ab", ["held"])
    assert copies(answers, 2) == [[1], [0]]


# ----------------------------------------------------------------------------------------- failures
def test_a_dead_peer_costs_a_warning_and_a_count_and_the_part_stays(ranks):
    *_, saved, waited = ranks(
        "ab",
        ["hurry", {"replica_patience_s": 2.0, "replication_linger_s": 0.5}],
        ["meet_all"],
        ["die_without_a_word", [1]],
        ["save_alone", 1, 0],
        ["wait_for_copies", 0, 30],
        dead=[1],
        replication_factor=2,
    )
    assert saved[0] < 5, "nothing waits for a peer"
    assert waited[0]["seconds"] < 10
    assert waited[0]["own"] == [[1, 0, False]]
    assert waited[0]["counts"]["unreplicated"] == 1
