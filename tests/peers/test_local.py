"""Local checkpoints after a node has lost its memory."""

import pytest

SAVES = (["save_local", 1], ["save_local", 2], ["close"])


def gets(answer):
    return {key: value for key, value in answer["asked"].items() if key in ("requests.get", "bytes.down") and value}


def test_a_node_that_lost_its_memory_gets_its_part_back_from_a_peer(ranks, lose, s3_url):
    options = {"replication_factor": 2, "dirpath": s3_url}
    ranks("abc", *SAVES, **options)
    lose("a")
    # Rank 0 loads first.
    loaded, again, _ = ranks("abc", ["load_local", {"late": [1, 1]}], ["load_local"], ["close"], **options)
    assert [answer.get("value") for answer in loaded] == [[200.0], [201.0], [202.0]], loaded
    assert all(gets(answer) == {} for answer in loaded)
    assert [2, 0] in [each[:2] for each in loaded[0]["own"]], "the part is the node's own again"
    assert [answer.get("value") for answer in again] == [[200.0], [201.0], [202.0]], again
    assert max(answer["seconds"] for answer in again) < 6


def test_a_node_that_comes_back_with_an_old_memory_does_not_take_all_back(ranks):
    """A queue gives a job the same node again, after it ran on another one for a while."""
    options = {"replication_factor": 2}
    ranks("ab", *SAVES, **options)
    ranks("cb", ["load_local"], ["save_local", 3], ["save_local", 4], ["close"], **options)
    # Rank 0 loads first; nothing else keeps it from its own memory.
    (loaded, _) = ranks("ab", ["load_local", {"late": [1, 1]}], ["close"], **options)
    assert [answer.get("value") for answer in loaded] == [[400.0], [401.0]], loaded
    assert max(answer["seconds"] for answer in loaded) < 6


@pytest.mark.matrix
def test_where_no_rank_has_anything_and_a_peer_does_not_load_ranks_say_so_soon(ranks):
    steps = ["load_local"], ["hurry", {"rendezvous_s": 2.0}], ["load_local", {"absent": 1}]
    late = ["hurry", {"rendezvous_s": 60.0}], ["load_local", {"late": [1, 4]}]
    loaded, _, (alone, _), _, again = ranks("ab", *steps, *late, replication_factor=2)
    # A rank that has waited in vain may come again.
    assert [answer["error"] for answer in (*loaded, *again)] == ["CheckpointNotFoundError"] * 4
    assert alone["error"] == "ConfigError"
    assert "not all 2 ranks came" in alone["message"]
    assert all(answer["seconds"] < 10 for answer in (*loaded, alone))


def test_a_rank_that_stands_still_with_the_store_of_all_holds_up_no_other_for_long(ranks):
    """Rank 0 may hold the store; an unreachable host does not even end its connections."""
    *_, at_the_end, _, loaded, given_up = ranks(
        "ab",
        ["hurry", {"store_answer_s": 0.5}],
        ["save_local", 1],
        # For longer than an answer takes: saves continue.
        ["stop", 0, 1],
        ["save_local", 2],
        ["save_local_now", 3, 0, 1],
        ["settle"],
        ["load_local", "step_3"],
        # For longer than training waits for an upload.
        ["save_local_now", 4, 0, 5.5],
        pending_timeout_s=3,
    )
    assert [answer.get("tiers") for answer in at_the_end] == [["durable", "memory"]] * 2, at_the_end
    assert [answer["value"] for answer in loaded] == [[300.0], [301.0]]
    assert ["tiers" in answer for answer in given_up] == [True, True], given_up
    assert given_up[1]["seconds"] < given_up[0]["seconds"] - 1
