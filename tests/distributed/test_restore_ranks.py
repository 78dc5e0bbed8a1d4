"""Restore with real processes over gloo, on one and two simulated nodes, from a real S3 server."""

import collections
import hashlib
import os
from pathlib import Path

import pytest
import torch
from support.counting_proxy import CountingProxy
from support.launch import launch, said
from support.restoring import flip, into_durable, into_memory, save_id

from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

MIB = 1 << 20
CHUNK = 2 * MIB
OLD, NEW = os.urandom(3 * MIB), os.urandom(16 * MIB)


def digest(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def durable(s3_url):
    store = open_store(TieredCheckpointConfig(dirpath=s3_url))
    yield store
    store.close()


@pytest.fixture
def nodes(memory_dir):
    """Two nodes: a memory folder of its own each."""
    folders = [f"{memory_dir}/{name}" for name in ("n", "m")]
    for folder in folders:
        os.mkdir(folder)
    return folders


def tier(node):
    return MemoryTier.open(node, "default")


def jobs(dirpath, memory_dirs, **common):
    return [{"dirpath": dirpath, "memory_dir": folder, **common} for folder in memory_dirs]


def total(answers, name):
    return sum(answer["metrics"].get(name, 0) for answer in answers)


def got(answers):
    return [(answer.get("save_id"), answer.get("tier"), answer.get("digest")) for answer in answers]


@pytest.fixture
def run(tmp_path):
    def run(ranks, **options):
        answers = launch(tmp_path, ranks, **options)
        for rank, (job, answer) in enumerate(zip(ranks, answers, strict=True)):
            assert answer is not None or job.get("die"), said(tmp_path, rank)
        return answers

    return run


def test_two_ranks_of_a_node_map_one_copy_from_memory(durable, nodes, run):
    into_durable(durable, "old.ckpt", OLD, 1, chunk=CHUNK)
    into_memory(tier(nodes[0]), durable.url, "new.ckpt", NEW, 2, chunk=CHUNK)
    answers = run(jobs(durable.url, [nodes[0]] * 2))
    assert got(answers) == [(save_id(2), "memory", digest(NEW))] * 2
    assert answers[0]["inode"] == answers[1]["inode"]
    assert total(answers, "requests.list") == 1
    assert total(answers, "bytes.down") < MIB
    assert answers[1]["metrics"] == {}


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.matrix), 2], ids=["one node", "two nodes"])
def test_four_ranks_with_wiped_memory_read_each_byte_once_a_node(durable, nodes, run, s3_server, count):
    into_durable(durable, "old.ckpt", OLD, 1, chunk=CHUNK)
    into_durable(durable, "new.ckpt", NEW, 2, chunk=CHUNK)
    placed = [nodes[0]] * 2 + [nodes[count - 1]] * 2
    with CountingProxy(s3_server.endpoint_url) as proxy:
        answers = run(jobs(durable.url, placed, endpoint_url=proxy.endpoint_url))
    assert got(answers) == [(save_id(2), "durable", digest(NEW))] * 4
    # By the stores' own counters.
    assert total(answers, "requests.list") == 1
    assert total(answers, "bytes.down") <= 1.02 * count * len(NEW)
    assert [bool(answer["bytes_read"]) for answer in answers] == [True, False, count == 2, False]
    # And by what went over the wire.
    assert proxy.count("GET", "list-type=2") == 1
    assert proxy.count("GET", "/run/new.ckpt") == count * len(NEW) // CHUNK
    assert proxy.count("GET", "/manifests/") == 2
    assert len(proxy.requests) == 1 + count * len(NEW) // CHUNK + 2
    assert count * len(NEW) < proxy.bytes_down <= 1.02 * count * len(NEW)

    again = run(jobs(durable.url, placed))
    assert got(again) == [(save_id(2), "memory", digest(NEW))] * 4
    assert total(again, "bytes.down") < MIB


def test_a_corrupt_copy_on_one_node_sends_that_node_to_its_peer(durable, nodes, run):
    into_durable(durable, "new.ckpt", NEW, 2, chunk=CHUNK)
    into_memory(tier(nodes[0]), durable.url, "new.ckpt", NEW, 2, chunk=CHUNK)
    flip(into_memory(tier(nodes[1]), durable.url, "new.ckpt", NEW, 2, chunk=CHUNK), 9 * MIB)
    answers = run(jobs(durable.url, [nodes[0], nodes[1], nodes[1]]))
    assert [(answer["save_id"], answer["digest"]) for answer in answers] == [(save_id(2), digest(NEW))] * 3
    assert [answer["tier"] for answer in answers] == ["memory", "peer", "peer"]
    assert total(answers, "bytes.down") < MIB


@pytest.mark.matrix
def test_corrupt_copies_that_s3_does_not_have_send_all_to_the_older_one(durable, nodes, run):
    into_durable(durable, "old.ckpt", OLD, 1, chunk=CHUNK)
    flip(into_memory(tier(nodes[0]), durable.url, "new.ckpt", NEW, 2, chunk=CHUNK))
    flip(into_memory(tier(nodes[1]), durable.url, "new.ckpt", NEW, 2, chunk=CHUNK), 9 * MIB)
    answers = run(jobs(durable.url, nodes))
    assert got(answers) == [(save_id(1), "durable", digest(OLD))] * 2


def test_a_flipped_byte_in_s3_sends_all_to_the_older_one(durable, nodes, run):
    into_durable(durable, "old.ckpt", OLD, 1, chunk=CHUNK)
    into_durable(durable, "new.ckpt", NEW, 2, chunk=CHUNK)
    damaged = bytearray(NEW)
    damaged[-1] ^= 1
    durable.put("new.ckpt", bytes(damaged))
    answers = run(jobs(durable.url, nodes))
    assert got(answers) == [(save_id(1), "durable", digest(OLD))] * 2


@pytest.mark.parametrize(
    ("dirpath", "endpoint_url", "error", "words"),
    [
        pytest.param(
            *("s3://there-is-no-such-bucket/run", None, "StoreError", "there-is-no-such-bucket"),
            marks=pytest.mark.matrix,
        ),
        (None, "http://127.0.0.1:9", "StoreError", "endpoint_url"),
    ],
    ids=["missing bucket", "unreachable"],
)
def test_the_error_of_rank_0_is_the_error_of_all(s3_url, nodes, run, dirpath, endpoint_url, error, words):
    answers = run(jobs(dirpath or s3_url, nodes, endpoint_url=endpoint_url))
    assert [answer["error"] for answer in answers] == [error] * 2
    assert len({answer["message"] for answer in answers}) == 1
    assert words in answers[0]["message"]
    assert max(answer["seconds"] for answer in answers) < 60


def test_a_rank_that_dies_is_an_error_on_the_others_not_a_hang(durable, nodes, run):
    into_durable(durable, "old.ckpt", OLD, 1, chunk=CHUNK)
    ranks = jobs(durable.url, nodes)
    ranks[1]["die"] = True
    answers = run(ranks)
    assert answers[1] is None
    assert [answer["error"] for answer in answers[:1]] == ["RestoreError"]
    assert max(answer["seconds"] for answer in answers[:1]) < 60


def test_a_rank_that_never_comes_is_named_within_the_bound(durable, nodes, run):
    ranks = jobs(durable.url, nodes, rendezvous_s=1.0)
    ranks[1]["late"] = True
    answers = run(ranks)
    assert answers[1] == {"late": True}
    assert [answer["error"] for answer in answers[:1]] == ["ConfigError"]
    assert all("every rank has to make it" in answer["message"] for answer in answers[:1])
    assert max(answer["seconds"] for answer in answers[:1]) < 60


@pytest.mark.matrix
def test_a_load_off_the_main_thread_is_refused(durable, nodes, run):
    answers = run(jobs(durable.url, [nodes[0]] * 2, thread=True))
    assert [answer["error"] for answer in answers] == ["ConfigError"] * 2
    assert all("main thread" in answer["message"] for answer in answers)


@pytest.mark.matrix
def test_the_public_interface_with_four_ranks_asks_s3_once(durable, nodes, run, s3_server, tmp_path):
    state = {"w": torch.arange(2_000_000.0), "global_step": 7}
    torch.save(state, tmp_path / "state.pt")
    data = Path(tmp_path, "state.pt").read_bytes()
    into_durable(durable, "step=7.ckpt", data, 1, chunk=CHUNK)
    with CountingProxy(s3_server.endpoint_url) as proxy:
        answers = run(jobs(durable.url, [nodes[0]] * 2 + [nodes[1]] * 2, endpoint_url=proxy.endpoint_url, through="io"))
    assert collections.Counter((answer.get("step"), answer.get("total")) for answer in answers) == {
        (7, float(state["w"].double().sum())): 4
    }, answers
    assert proxy.count("GET", "list-type=2") == 1
    assert proxy.bytes_down <= 1.02 * 2 * len(data)


def test_nodes_that_only_load_keep_the_last_checkpoints_over_restarts(durable, nodes, run):
    """Of full checkpoints, of which rank 0's node saves each, and the other node gets one at each restart."""
    for number in (1, 2, 3):
        into_memory(tier(nodes[0]), durable.url, f"{number}.ckpt", OLD, number, chunk=CHUNK)
        answers = run(jobs(durable.url, [*nodes, nodes[1]]))
        assert got(answers) == [(save_id(number), each, digest(OLD)) for each in ("memory", "peer", "peer")]
    # What only its own node has saved stays there.
    assert [stored.save_id for stored in tier(nodes[0]).parts()] == [save_id(number) for number in (1, 2, 3)]
    assert [stored.save_id for stored in tier(nodes[1]).parts()] == [save_id(number) for number in (2, 3)]
