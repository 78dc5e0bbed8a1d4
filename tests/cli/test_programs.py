"""The functions for other programs than the training: new checkpoints, waits, silence, and cost."""

import threading

import pytest
from support import committing
from support.failing import failing
from support.story import op_id

from tiered_checkpoint_io import find_latest, list_checkpoints, new_checkpoints
from tiered_checkpoint_io.engine.durable.manifests import names_of
from tiered_checkpoint_io.errors import (
    StoreError,
)
from tiered_checkpoint_io.stores.directory import DirectoryStore


def test_each_durable_checkpoint_is_new_once_also_across_a_restart(node):
    """An evaluator starts before the run, is stopped, and continues after its last checkpoint."""
    stop = threading.Event()
    news = new_checkpoints(node.dirpath, every_s=0.01, stop=stop, after="")
    saved = []

    def begin(name):
        saved.append(node.save(name, b"A"))
        node.save("memory.ckpt", b"M", durable=False)
        # A further name of the same bytes is not new.
        node.alias("last.ckpt", name)
        node.request("copy", "copy.ckpt", name)
        node.drain()

    begin("2.ckpt")
    assert next(news).name == "2.ckpt"
    begin("1.ckpt")
    second = next(news)
    assert (second.name, second.save_id, second.step) == ("1.ckpt", saved[1], 5)
    # A copy that stays replaces a deleted checkpoint.
    begin("3.ckpt")
    node.delete("3.ckpt")
    node.drain()
    third = next(news)
    assert (third.copy_of or third.save_id) == saved[2]
    stop.set()
    assert list(news) == []
    again = new_checkpoints(node.dirpath, after=saved[0], idle_timeout_s=0)
    assert [each.copy_of or each.save_id for each in again] == saved[1:]
    assert list(new_checkpoints(node.dirpath, idle_timeout_s=0)) == [], "none from now on"


def test_what_is_handed_out_stays_until_the_next_one_is_asked_for(node):
    for name in ("1.ckpt", "2.ckpt", "3.ckpt"):
        node.save(name, b"A")
    node.drain()

    def left_without(name):
        node.delete(name)
        node.drain()
        return sorted(names_of(DirectoryStore(node.dirpath)))

    news = new_checkpoints(node.dirpath, after="", idle_timeout_s=0)
    assert next(news).name == "1.ckpt"
    assert left_without("1.ckpt") == ["1.ckpt", "2.ckpt", "3.ckpt"]
    assert left_without("2.ckpt") == ["1.ckpt", "3.ckpt"]
    # A checkpoint that was deleted before its turn is left out.
    assert next(news).name == "3.ckpt"
    assert left_without("1.ckpt") == ["3.ckpt"]
    news.close()
    assert left_without("3.ckpt") == []


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_is_durable_only_once_it_has_taken_the_place_of_the_one_before(tmp_path, kind):
    """An evaluator must not read the old bytes for the new step."""
    store = DirectoryStore(str(tmp_path / "run"))
    committing.save(store, "a", 1, kind=kind)
    committing.alias(store, "last", "a")
    committing.begin_overwrite(store, "a", 2, kind=kind)
    assert list(new_checkpoints(store.url, after=op_id(1), idle_timeout_s=0)) == []
    # A restart, too, takes the one before until then.
    latest = find_latest(store.url)
    assert (latest.name, latest.step, latest.state) == ("a", 1, "durable")
    rows = [(each.name, each.step, each.state) for each in list_checkpoints(store.url)]
    assert rows == [("a", 1, "durable"), ("last", 1, "durable")]
    committing.save(store, "a", 2, kind=kind)
    assert [each.step for each in new_checkpoints(store.url, after=op_id(1), idle_timeout_s=0)] == [2]
    assert [(each.name, each.step, each.state) for each in list_checkpoints(store.url)] == [
        ("a", 2, "durable"),
        ("last", 2, "durable"),
    ]


def test_an_outage_is_reported_once_and_waited_out_except_at_the_first_look(node, monkeypatch, caplog):
    node.save("a.ckpt", b"A")
    node.drain()
    silent, listing = [True], DirectoryStore.list

    def list_or_not(store, prefix):
        if silent[0]:
            raise StoreError("away", operation="list", reason="unavailable")
        return listing(store, prefix)

    monkeypatch.setattr(DirectoryStore, "list", list_or_not)
    news = new_checkpoints(node.dirpath, every_s=0.01, after="")
    with failing("unavailable"):
        next(news)
    silent[0] = False
    news = new_checkpoints(node.dirpath, every_s=0.01, after="")
    assert next(news).name == "a.ckpt"
    node.save("b.ckpt", b"B")
    node.drain()
    silent[0] = True
    back = threading.Timer(0.2, lambda: silent.__setitem__(0, False))
    back.start()
    assert next(news).name == "b.ckpt"
    back.join()
    assert [record.message.count("asking again") for record in caplog.records if "away" in record.message] == [1]
