"""Nodes are lost with their memory; the job resumes from their peers' memory, without the durable tier."""

import itertools
import os

import pytest
from support.fault_proxy import FaultProxy
from support.restoring import OLD, World, into_memory, save_id

#: Nodes of two ranks each, and how many copies there are.
CASES = [("aabbcc", 2), ("aabbccdd", 2), ("aabbcc", 3), ("aabbccdd", 3)]
LOSSES = [
    pytest.param(nodes, factor, lost, id=f"{len(set(nodes))} nodes, factor {factor}, without {''.join(lost)}")
    for nodes, factor in CASES
    for lost in itertools.combinations(sorted(set(nodes)), factor - 1)
]


def gets(answer):
    return {key: value for key, value in answer["asked"].items() if key in ("requests.get", "bytes.down") and value}


ALL = os.environ.get("TIERED_TEST_ALL_LOSSES") == "1"
#: One of the smallest job and one of the largest; all of them by ``make test-peers``.
SAMPLE = [LOSSES[0], pytest.param(*LOSSES[-1].values, id=LOSSES[-1].id, marks=pytest.mark.matrix)]


@pytest.mark.parametrize(("nodes", "factor", "lost"), LOSSES if ALL else SAMPLE)
def test_a_job_goes_on_from_peers(ranks, lose, s3_url, record_property, nodes, factor, lost):
    options = {"replication_factor": factor, "dirpath": s3_url, "drain": "process"}
    full = ["save_full", 1, {"name": "last.ckpt"}]
    ranks(nodes, full, ["save", 2], ["save", 3], ["close"], **options)
    lose(*lost)
    shards, full, _ = ranks(nodes, ["load", 3], ["load_full", 1, {"path": "tiered:last"}], ["close"], **options)
    # Every part has an owner again, which would upload it.
    owners = {node: answer["tiers"]["own"] for node, answer in zip(nodes, shards, strict=True)}
    assert sorted(part for own in owners.values() for step, part, *_ in own if step == 3) == [*range(len(nodes))]
    for answer in shards:
        assert answer.get("matches"), str(answer)
        assert gets(answer) == {}
    for node, answer in zip(nodes, full, strict=True):
        assert answer.get("matches"), str(answer)
        assert (answer["step"], gets(answer)) == (1, {})
        if node in lost:
            assert answer["tier"] == "peer"
    record_property("durable_gets", sum(each["asked"].get("requests.get", 0) for each in (*shards, *full)))


def test_a_full_checkpoint_is_read_from_s3_once_a_node_after_two_lists(ranks, lose, s3_url, s3_server):
    ranks("aabb", ["save_full", 1, ["memory", "durable"], {"name": "new.ckpt"}], ["close"], dirpath=s3_url)
    lose("a", "b")
    with FaultProxy(s3_server.endpoint_url) as proxy:
        (answers,) = ranks("aabb", ["load_full", 1], dirpath=s3_url, endpoint_url=proxy.endpoint_url)
    assert [(answer.get("matches"), answer.get("tier")) for answer in answers] == [(True, "durable")] * 4, answers
    assert proxy.count("GET", "list-type=2") == 2
    assert (proxy.count("GET", "/manifests/"), proxy.count("GET", "/run/new.ckpt")) == (1, 2)
    (answers,) = ranks("aabb", ["load_full", 1], dirpath=s3_url)
    assert [(answer["matches"], answer["tier"]) for answer in answers] == [(True, "memory")] * 4


@pytest.mark.matrix
def test_a_full_checkpoint_goes_from_one_node_to_five(ranks, s3_url):
    ranks("abcdef", ["save_full", 1, ["memory"], {"name": "new.ckpt"}], ["close"], dirpath=s3_url, drain="process")
    (answers, _) = ranks("abcdef", ["load_full", 1], ["close"], dirpath=s3_url, drain="process")
    found = [(answer.get("matches"), answer.get("tier")) for answer in answers]
    assert found == [(True, "memory"), *[(True, "peer")] * 5], answers


@pytest.mark.parametrize(("nodes", "lost"), [("aa", ""), ("ab", "a"), ("aa", "a")])
def test_a_load_makes_at_most_four_exchanges_and_no_group(ranks, lose, nodes, lost):
    options = {"replication_factor": len(set(nodes)), "save_to_s3": True}
    ranks(nodes, ["save_full", 1, ["memory", "durable"]], ["save", 2], ["save_local", 3], ["close"], **options)
    lose(*lost)
    loads = ["counted", "load_full", 1, "step=1.ckpt"], ["counted", "load", 2], ["counted", "load_local"]
    full, sharded, local, _ = ranks(nodes, *loads, ["close"], **options)
    assert [each["answer"].get("matches") for each in (*full, *sharded)] == [True] * 4
    assert [each["answer"].get("value") for each in local] == [[300.0], [301.0]]
    first = ["gather_object", "broadcast_object_list"]
    for each in (*full, *local):
        assert (each["ours"], each["dcp"]) == ([*first, "all_gather_object", "all_gather_object"], [])
    # DCP itself gathers plans, scatters them, and gathers errors.
    for each in sharded:
        assert each["ours"] == [*first, "all_gather_object"]
        assert each["dcp"] == ["gather_object", "scatter_object_list", "all_gather_object"]


def test_a_load_of_more_ranks_opens_no_more_sockets(ranks):
    opened = [ranks("a" * count, ["save_local", 1], ["counted", "load_local"])[1] for count in (8, 16)]
    assert [each["answer"]["value"] for each in opened[1]] == [[100.0 + rank] for rank in range(16)]
    assert {each["sockets"] for answers in opened for each in answers} == {0}


def test_a_rank_that_never_comes_to_a_load_is_named_within_the_bound(ranks):
    _, (alone, _) = ranks("ab", ["hurry", {"rendezvous_s": 1.0}], ["load_full", 1, {"absent": 1}])
    assert alone["error"] == "ConfigError"
    assert "every rank has to make it" in alone["message"]
    assert alone["seconds"] < 60


def test_nodes_that_only_load_keep_the_last_checkpoints(memory_dir, tmp_path):
    """Rank 0's node saves each full checkpoint, and the other node gets one at each restart."""
    world = World(memory_dir, str(tmp_path / "durable"))
    for number in (1, 2, 3):
        into_memory(world.tier("a"), world.store.url, f"{number}.ckpt", OLD, number)
        answers = world.restore_all("abb")
        assert answers == [(save_id(number), tier, OLD) for tier in ("memory", "peer", "peer")]
    # A part that only its own node has stays there.
    assert [stored.save_id for stored in world.tier("a").parts()] == [save_id(number) for number in (1, 2, 3)]
    assert [stored.save_id for stored in world.tier("b").parts()] == [save_id(number) for number in (2, 3)]


def test_nodes_may_be_lost_one_after_the_other_where_ranks_come_to_other_nodes(ranks, lose):
    ranks("abc", ["save", 1], ["save", 2], ["close"], replication_factor=2)
    lose("a")
    meet = [["meet_all"], ["await_parts", 2, [0, 1, 2]], ["close"]]
    (loaded, *_) = ranks("bc", ["load", 2], *meet, replication_factor=2)
    assert all(answer.get("matches") for answer in loaded), loaded
    lose("c")
    (answers,) = ranks("bd", ["load", 2], replication_factor=2)
    assert [(answer["matches"], answer["name"], gets(answer)) for answer in answers] == [(True, "step_2", {})] * 2


@pytest.mark.matrix
def test_what_a_lost_node_was_to_upload_is_uploaded_by_who_takes_its_place(ranks, lose, tmp_path):
    options = {"replication_factor": 2}
    # No upload succeeds while the durable tier's folder is a file.
    (tmp_path / "durable").write_text("")
    ranks("ab", ["save_full", 1, ["memory", "durable"]], **options)
    lose("a")
    (tmp_path / "durable").unlink()
    loaded, _ = ranks("ab", ["load_full", 1], ["close"], **options)
    assert [answer.get("matches") for answer in loaded] == [True] * 2
    assert (tmp_path / "durable" / "step=1.ckpt").exists()


@pytest.mark.matrix
def test_local_checkpoints_of_two_nodes_are_whole_on_each_of_them(ranks, lose):
    ranks("ab", ["save_local", 1], ["save_local", 2], ["close"], replication_factor=2)
    (answers,) = ranks("aa", ["load_local"], replication_factor=2)
    assert [answer["value"] for answer in answers] == [[200.0], [201.0]]
    assert all(gets(answer) == {} for answer in answers)
