"""Copies in the memory of peers: what is saved on one node is soon on others, and nothing waits for it."""

import pytest


def copies(answers, step):
    """By rank, whose parts of a step its node keeps."""
    return [sorted(rank for s, rank, _ in answer["copies"] if s == step) for answer in answers]


@pytest.mark.matrix
def test_shards_are_copied_around_three_nodes_of_two_ranks(ranks):
    (first, second) = ranks("aabbcc", ["save", 1], ["save", 2], replication_factor=2)
    assert copies(second, 2) == [[4, 5], [4, 5], [0, 1], [0, 1], [2, 3], [2, 3]]
    for answer in (*first, *second):
        assert all(safe for *_, safe in answer["own"]), answer
        assert all(safe for *_, safe in answer["copies"]), answer
        assert answer["counts"].get("unreplicated", 0) == 0
    assert [answer["counts"]["replicated"] for answer in second] == [2] * 6


@pytest.mark.matrix
def test_with_factor_three_each_part_is_on_three_of_four_nodes(ranks):
    (answers,) = ranks("abcd", ["save_async", 1], replication_factor=3)
    assert copies(answers, 1) == [[2, 3], [0, 3], [0, 1], [1, 2]]


def test_a_full_checkpoint_is_saved_by_one_rank_and_copied(ranks):
    (answers,) = ranks("aabb", ["save_full", 3], replication_factor=2)
    assert [answer["own"] for answer in answers] == [[[3, 0, True]]] * 2 + [[]] * 2
    assert [answer["copies"] for answer in answers] == [[]] * 2 + [[[3, 0, True]]] * 2


def test_local_checkpoints_and_saves_in_a_thread_of_dcp_are_copied(ranks):
    local, threaded = ranks("ab", ["save_local", 1], ["save_by_thread_of_dcp", 2], replication_factor=2)
    assert copies(local, 1) == [[1], [0]]
    assert copies(threaded, 2) == [[1], [0]]


@pytest.mark.matrix
def test_memory_stays_bounded_over_many_saves(ranks):
    *_, last = ranks("ab", *(["save", step] for step in range(1, 7)), replication_factor=2, memory_keep_last=2)
    for answer in last:
        assert [step for step, *_ in answer["own"]] == [5, 6]
        assert [step for step, *_ in answer["copies"]] == [5, 6]


@pytest.mark.matrix
def test_memory_stays_bounded_where_names_tell_a_metric(ranks):
    saves = [["save_full", step, {"name": f"best-epoch={step}-val_loss=0.{step}.ckpt"}] for step in range(1, 7)]
    *_, (one, other) = ranks("ab", *saves, replication_factor=2, memory_keep_last=2)
    assert [step for step, *_ in one["own"]] == [step for step, *_ in other["copies"]] == [5, 6]


def test_of_containers_on_one_machine_each_has_its_copies_on_another(ranks):
    (answers,) = ranks("abcd", ["save", 1], machines="aabb", replication_factor=2)
    assert [answer["copies"] for answer in answers] == [[[1, rank, True]] for rank in (2, 3, 0, 1)]


@pytest.mark.parametrize(
    ("nodes", "machines", "factor"),
    [
        ("ab", "aa", 2),
        *(pytest.param(nodes, nodes, len(nodes) // 2 + 1, marks=pytest.mark.matrix) for nodes in ("aa", "aabb")),
    ],
)
def test_copies_on_the_same_machine_are_refused_on_all_ranks(ranks, nodes, machines, factor):
    """Also where each of its containers has a memory of its own, as with Kubernetes' emptyDir."""
    (answers,) = ranks(nodes, ["save", 1], machines=machines, replication_factor=factor)
    assert [answer["error"] for answer in answers] == ["ConfigError"] * len(nodes)
    assert all("same machine" in answer["message"] for answer in answers)


@pytest.mark.matrix
def test_what_was_not_copied_when_the_process_ended_is_copied_by_the_next(ranks, lose):
    ranks("ab", ["save_full", 1], ["close"], replication_factor=2)
    lose("b")
    (_, answers) = ranks("ab", ["meet_all"], ["settle"], replication_factor=2)
    assert answers[1]["copies"] == [[1, 0, True]]


def test_each_group_s_newest_is_copied_by_its_own_ranks_where_groups_save_side_by_side(ranks):
    """Of both groups, a node has a part of rank 0, or of rank 1."""
    stages = [[0, 1], [2, 3]]
    ranks("abab", ["save_local", 1, stages], ["close"], replication_factor=1)
    (answers, _) = ranks("abab", ["save_local", 3, stages], ["close"], replication_factor=2)
    for rank, answer in enumerate(answers):
        assert sorted(answer["copies"]) == [[step, 1 - rank % 2, True] for step in (1, 2, 3, 4)], answer


@pytest.mark.matrix
def test_closing_at_once_still_sends_what_was_saved(ranks):
    _, _, seconds, after = ranks(
        "ab", ["save_and_go", 1], ["save_and_go", 2], ["close"], ["threads"], replication_factor=2
    )
    assert max(seconds) < 20
    assert after == [[], []]
    (answers,) = ranks("ab", ["held"])
    for answer in answers:
        assert answer["copies"][-1][0] == 2


# ----------------------------------------------------------------------------------------- failures
def test_a_dead_peer_costs_a_warning_and_a_count_and_the_part_stays(ranks):
    *_, saved, waited = ranks(
        "ab",
        ["hurry", {"accept_s": 2.0, "replication_linger_s": 0.5}],
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


@pytest.mark.matrix
def test_a_stalled_peer_is_given_up_and_found_again_when_it_wakes_up(ranks):
    *_, waited, _, _, again, told = ranks(
        "abc",
        ["hurry", {"accept_s": 1.0, "message_s": 2.0, "replication_linger_s": 0.5}],
        ["meet_all"],
        ["stop", 1, 5],
        ["save_alone", 1, 0],
        ["wait_for_copies", 0, 30],
        # All meet there: the peer is awake.
        ["settle"],
        ["save_alone", 2, 0],
        ["wait_for_copies", 0, 30],
        ["settle"],
        replication_factor=3,
    )
    assert waited[0]["seconds"] < 5
    assert waited[0]["counts"]["unreplicated"] == 1
    # The other peer has its copy all the same.
    assert [1, 0, False] in told[2]["copies"]
    assert again[0]["counts"] == {**again[0]["counts"], "unreplicated": 1, "replicated": 1}
    assert [2, 0, True] in told[1]["copies"]


@pytest.mark.matrix
def test_bytes_that_change_on_the_way_never_become_a_copy(ranks):
    _, _, answers = ranks("ab", ["save", 1], ["spoil", 0, 0], ["save", 2], replication_factor=2)
    assert [step for step, *_ in answers[1]["copies"]] == [1]
    assert [step for step, *_ in answers[0]["copies"]] == [1, 2]
    assert answers[0]["counts"]["unreplicated"] == 1
    # Step 2 is not safe, and step 1 stays until something newer is.
    assert answers[0]["own"] == [[1, 0, True], [2, 0, False]]
