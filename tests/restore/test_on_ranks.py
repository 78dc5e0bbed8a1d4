"""Restore on several nodes, with ranks as threads: what is taken, and what is told."""

from pathlib import Path

import pytest
from support.faulty import FaultyStore
from support.restoring import (
    CHUNK,
    NEW,
    OLD,
    flip,
    in_ranks,
    into_durable,
    into_memory,
    save_id,
)

from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.errors import (
    RestoreError,
)
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.stores.directory import DirectoryStore


def test_two_nodes_fetch_once_each_and_all_ranks_have_it(world):
    into_durable(world.store, "a.ckpt", NEW, 1)
    before = world.store.metrics.snapshot()
    got = world.restore_all(["n", "n", "m", "m"])
    after = world.store.metrics.snapshot()
    assert got == [(save_id(1), "durable", NEW)] * 4
    small = len(world.store.get(manifest_key("a.ckpt")))
    assert after["requests.list"] - before.get("requests.list", 0) == 1
    assert after["bytes.down"] - before.get("bytes.down", 0) == 2 * len(NEW) + small
    # It lies in memory for the next start, and is not sent again.
    assert world.restore_all(["n", "n", "m", "m"]) == [(save_id(1), "memory", NEW)] * 4
    assert all(stored.drained for node in "nm" for stored in world.tier(node).parts())


@pytest.mark.parametrize("chunk", [CHUNK, 1 << 10], ids=["few hashes", "more than go to all ranks"])
def test_a_corrupt_copy_on_one_node_sends_that_node_to_its_peer(world, chunk):
    into_durable(world.store, "a.ckpt", NEW, 2, chunk=chunk)
    into_memory(world.tier("n"), world.store.url, "a.ckpt", NEW, 2, chunk=chunk)
    flip(into_memory(world.tier("m"), world.store.url, "a.ckpt", NEW, 2, chunk=chunk))
    got = world.restore_all(["n", "m", "m"])
    assert got == [(save_id(2), tier, NEW) for tier in ("memory", "peer", "peer")]


@pytest.mark.parametrize("nodes", [["n", "m"], ["m", "n"]])
def test_last_is_what_the_latest_alias_means_that_waits_on_any_node(world, nodes):
    """Rank 0 may be on another node than before."""
    into_durable(world.store, "old.ckpt", OLD, 1)
    into_memory(world.tier("m"), world.store.url, "new.ckpt", NEW, 3)
    for node, number, target in (("n", 2, "old.ckpt"), ("m", 4, "new.ckpt")):
        Queue(world.tier(node).root).submit(Request(save_id(number), "alias", "last.ckpt", world.store.url, target))
    assert [got[0] for got in world.restore_all(nodes, Selector("last"))] == [save_id(3)] * 2


def test_a_checkpoint_of_others_is_read_once_per_node(world):
    class Remote(DirectoryStore):
        """Not to be opened as a local file."""

    Path(world.store.url).mkdir()
    Path(world.store.url, "plain.ckpt").write_bytes(NEW)
    remote = Remote(world.store.url)
    for node in ("n", "m"):
        world.tier(node)

    def work(group):
        restorer = world.restorer(group.node, remote, "gs://bucket/run")
        restored = restorer(Selector("name", "plain.ckpt"), group)
        group.all_gather(None)
        data = restored.path.read_bytes()
        group.all_gather(None)
        restored.release()
        return data, restored.path

    got = in_ranks(["n", "n", "m", "m"], work)
    assert [data for data, _ in got] == [NEW] * 4
    assert got[0][1] == got[1][1] != got[2][1] == got[3][1]
    assert remote.metrics.snapshot()["bytes.down"] == 2 * len(NEW)
    assert not any(path.exists() for _, path in got)


@pytest.mark.parametrize("broken", ["list", "read"])
def test_an_error_on_one_rank_reaches_all(world, broken):
    into_durable(world.store, "a.ckpt", NEW, 1)
    into_durable(world.store, "b.ckpt", NEW, 2)

    class Broken(FaultyStore):
        def list(self, prefix):
            if broken == "list":
                raise RuntimeError("out of order")
            return super().list(prefix)

        def read_into(self, key, offset, buffer):
            raise RuntimeError("out of order")

    rank = {"list": 0, "read": 2}[broken]
    got = world.restore_all(["n", "n", "m", "m"], stores={rank: Broken(world.store)})
    assert {type(error) for error in got} == {RestoreError}
    assert len({str(error) for error in got}) == 1
    assert "RuntimeError: out of order" in str(got[0])


def test_an_unreadable_memory_on_one_rank_reaches_all(world, monkeypatch):
    into_durable(world.store, "a.ckpt", NEW, 1)
    world.tier("n")
    once, parts = iter([OSError(5, "I/O error")]), world.tier("m").parts

    def fail_once():
        if (error := next(once, None)) is not None:
            raise error
        return parts()

    monkeypatch.setattr(world.tier("m"), "parts", fail_once)
    got = world.restore_all(["n", "m", "n"])
    assert {str(error) for error in got} == {"OSError: [Errno 5] I/O error [operation=load, rank=1]"}
