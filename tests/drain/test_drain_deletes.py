"""The drain's deletes, which wait for the save that replaces what they delete."""

import threading
from unittest.mock import Mock

from support.draining import names, readable

from tiered_checkpoint_io.engine.drain import execute, queue
from tiered_checkpoint_io.errors import StoreError

from .test_drain import Broken, drain, node, store  # noqa: F401 - fixtures


def test_a_delete_goes_with_the_save_that_replaces_and_stays_where_that_is_given_up(node, store):  # noqa: F811
    """A later save of something else makes up for nothing, and the one that is needed is tried until it is there."""
    away = threading.Event()
    broken = Broken(store, lambda key: StoreError("no", reason="access") if key == "best-2" and away.is_set() else None)
    node.save("best-1", b"1")
    for fate in ("committed", "skipped"):
        away.set()
        best = node.save("best-2", b"2")
        old, other = node.request("delete", "best-1", best), node.save("other", b"o")
        drain(node, broken).run(once=True)
        assert (node.states()[best], node.states()[other]) == ("failed", "committed")
        assert readable(store, "best-1") == b"1"
        if fate == "skipped":
            node.cancel(best)
        away.clear()
        drain(node, broken).run(once=True)
        assert (node.states()[best], node.states()[old]) == (fate, fate)
        assert names(store) == sorted(["best-2" if fate == "committed" else "best-1", "other"])
        node.save("best-1", b"1")
        node.delete("best-2")
        drain(node).run(once=True)
    assert "did not reach the durable tier" in node.queue.outcome(old).error


def test_what_a_delete_waits_for_is_known_however_much_was_done_since(node, store, monkeypatch):  # noqa: F811
    monkeypatch.setattr(queue, "_KEEP", 4)
    node.save("old", b"old")
    new = node.save("new", b"new")
    held = node.request("delete", "old", new)
    with monkeypatch.context() as locked:
        locked.setattr(execute.sweep, "delete", Mock(side_effect=StoreError("locked", reason="access")))
        for number in range(12):
            node.save(f"{number}", b"more")
            drain(node).run(once=True)
    assert [request.op_id for request in node.queue.requests()] == [held]
    drain(node).run(once=True)
    assert node.states()[held] == "committed"
    assert "old" not in names(store)
