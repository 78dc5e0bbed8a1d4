"""Restore with real processes over gloo, on one and two simulated nodes, from a real S3 server."""

import hashlib
import os

import pytest
from support.counting_proxy import CountingProxy
from support.launch import launch, said
from support.restoring import into_durable, into_memory, save_id

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
        for rank, answer in enumerate(answers):
            assert answer is not None, said(tmp_path, rank)
        return answers

    return run


def test_four_ranks_with_wiped_memory_read_each_byte_once_a_node_and_map_one_copy(durable, nodes, run, s3_server):
    into_durable(durable, "old.ckpt", OLD, 1, chunk=CHUNK)
    into_durable(durable, "new.ckpt", NEW, 2, chunk=CHUNK)
    placed = [nodes[0]] * 2 + [nodes[1]] * 2
    with CountingProxy(s3_server.endpoint_url) as proxy:
        answers = run(jobs(durable.url, placed, endpoint_url=proxy.endpoint_url))
    assert got(answers) == [(save_id(2), "durable", digest(NEW))] * 4
    # By the stores' own counters.
    assert total(answers, "requests.list") == 1
    assert total(answers, "bytes.down") <= 2.04 * len(NEW)
    assert [bool(answer["bytes_read"]) for answer in answers] == [True, False, True, False]
    # And by what went over the wire.
    assert proxy.count("GET", "list-type=2") == 1
    assert proxy.count("GET", "/run/new.ckpt") == 2 * len(NEW) // CHUNK
    assert proxy.count("GET", "/manifests/") == 2
    assert len(proxy.requests) == 1 + 2 * len(NEW) // CHUNK + 2
    assert 2 * len(NEW) < proxy.bytes_down <= 2.04 * len(NEW)

    again = run(jobs(durable.url, placed))
    assert got(again) == [(save_id(2), "memory", digest(NEW))] * 4
    assert total(again, "requests.list") == 1
    assert total(again, "bytes.down") < MIB
    assert again[1]["metrics"] == {}
    inodes = [answer["inode"] for answer in again]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3], "the ranks of a node map one copy"


def test_a_rank_that_never_comes_is_named_within_the_bound(durable, nodes, run):
    ranks = jobs(durable.url, nodes, rendezvous_s=1.0)
    ranks[1]["late"] = True
    answers = run(ranks)
    assert answers[1] == {"late": True}
    assert [answer["error"] for answer in answers[:1]] == ["ConfigError"]
    assert all("every rank has to make it" in answer["message"] for answer in answers[:1])
    assert max(answer["seconds"] for answer in answers[:1]) < 60


def test_nodes_that_only_load_keep_the_last_checkpoints_over_restarts(durable, nodes, run):
    """Of full checkpoints, of which rank 0's node saves each, and the other node gets one at each restart."""
    for number in (1, 2, 3):
        into_memory(tier(nodes[0]), durable.url, f"{number}.ckpt", OLD, number, chunk=CHUNK)
        answers = run(jobs(durable.url, [*nodes, nodes[1]]))
        assert got(answers) == [(save_id(number), each, digest(OLD)) for each in ("memory", "peer", "peer")]
    # What only its own node has saved stays there.
    assert [stored.save_id for stored in tier(nodes[0]).parts()] == [save_id(number) for number in (1, 2, 3)]
    assert [stored.save_id for stored in tier(nodes[1]).parts()] == [save_id(number) for number in (2, 3)]
