"""Restore on one node and on several, with ranks as threads; also of checkpoints that another run overwrites."""

import contextlib
import os
import tempfile

import pytest
from support.failing import failing
from support.faulty import FaultyStore
from support.restoring import (
    CHUNK,
    LATEST,
    NEW,
    OLD,
    flip,
    into_durable,
    into_memory,
    save_id,
)

from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.errors import (
    RestoreError,
    StoreError,
)
from tiered_checkpoint_io.stores.directory import DirectoryStore


def test_without_room_in_memory_a_temporary_file_serves_and_goes(world, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    into_durable(world.store, "a.ckpt", NEW, 1)
    world.tier(budget_bytes=CHUNK)
    before = sorted(tmp_path.iterdir())

    def read(restored):
        assert os.readlink(restored.path).startswith(f"{tmp_path}/tiered-read-")
        return restored.path.read_bytes()

    assert world.restorer(read=read)(LATEST, Group())[1] == NEW
    assert sorted(tmp_path.iterdir()) == before
    assert not list((world.tier().root / "saves").rglob("*.ckpt"))


@pytest.mark.parametrize("reason", ["access", "config", "credentials"])
def test_a_refusal_is_an_error_even_if_memory_has_something_but_for_credentials_that_are_not_good(world, reason):
    class Refusing(FaultyStore):
        def list(self, prefix):
            raise StoreError("no", reason=reason)

    with failing(reason):
        world.restore(store=Refusing(world.store))
    into_memory(world.tier(), world.store.url, "m.ckpt", NEW, 2)
    is_silence = reason == "credentials"
    with contextlib.nullcontext() if is_silence else failing(reason):
        assert world.restore(store=Refusing(world.store))[1] == NEW


#: An object of an overwrite under way may be the larger or the smaller.
SHORT = OLD[: 2 * CHUNK]


class Overtaken(DirectoryStore):
    """During each first read of a file's bytes, the drain of another run continues."""

    def __init__(self, root, **then):
        super().__init__(root)
        self.then = then

    def read_pieces(self, key, offset, pieces, filled):
        self.then.pop(key.partition(".")[0], lambda: None)()
        super().read_pieces(key, offset, pieces, filled)


@pytest.mark.parametrize("selector", [LATEST, Selector("name", "last.ckpt")], ids=["latest", "name"])
def test_what_another_run_overwrites_while_it_is_read_is_read_anew(world, selector, caplog):
    into_durable(world.store, "milestone.ckpt", SHORT, 1)
    into_durable(world.store, "last.ckpt", OLD, 2)
    overtaken = Overtaken(world.store.url, last=lambda: into_durable(world.store, "last.ckpt", NEW, 3))
    restored, data = world.restore(selector, store=overtaken)
    assert (data, restored.content.save_id, restored.newest_save_id) == (NEW, save_id(3), save_id(3))
    assert "last.ckpt was removed or overwritten while it was read" in caplog.text


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
