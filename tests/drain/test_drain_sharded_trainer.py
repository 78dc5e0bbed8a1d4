"""Drains of sharded checkpoints, as trainers see them: queued and awaited parts, and the leaving of a drain."""

import time
from collections import Counter

import pytest
from support.draining import Node, drain, working
from support.faulty import Injected, refusing
from support.sharded import readable
from support.story import op_id
from support.waiting import until

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.status import Announcer
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.logs import get_logger
from tiered_checkpoint_io.model import ids

from .test_drain_sharded import part_op, pending

#: Without retries.
LATER = Timing(redo_first_s=3600, redo_max_s=3600, redo_permanent_s=3600, gather_first_s=0.2, gather_max_s=0.2)


@pytest.fixture
def bounded(memory_dir, store):
    """Returns a node for two saves at once; the trainer waits a second for a drain that does not come."""
    return Node(memory_dir, store.url, max_pending=2, pending_timeout_s=1, wait_timeout_s=60)


def test_max_pending_counts_saves_and_a_cancel_takes_all_their_parts(bounded, handle_of):
    handle, lock = handle_of(bounded), try_lock(bounded.root / LOCK_FILE)
    for rank in (3, 2, 1, 0):
        bounded.part("1.ckpt", 1, rank, world_size=5)
    assert handle.has_room(op_id(90))
    assert handle.pending_saves() == [op_id(1)]
    for rank in (3, 2, 1, 0):
        bounded.part("2.ckpt", 2, rank, world_size=5)
    assert not handle.has_room(op_id(91))
    bounded.queue.finish(Outcome(part_op(1, 2), "part", "1.ckpt", 1, "failed", "no"), final=False)
    assert handle.has_room(op_id(92))
    assert [request.target for request in bounded.queue.requests()] == [op_id(1)]
    release(lock)
    drain(bounded).run(once=True)
    cancelled = [op_id(1), *(part_op(1, rank) for rank in (1, 2, 3))]
    assert {bounded.states()[op] for op in cancelled} == {"skipped"}
    assert pending(bounded) == [op_id(2)]


def test_what_waits_for_the_parts_of_a_lost_node_does_not_hold_up_the_next_start(bounded, handle_of):
    """The wait for parts is 30 minutes by default; the queue is full, as if uploads were slow."""
    for number in (1, 2):
        bounded.part(f"{number}.ckpt", number, 0, world_size=2)
    drain(bounded).run(once=True)
    assert pending(bounded) == [op_id(1), op_id(2)]
    lock, began = try_lock(bounded.root / LOCK_FILE), time.monotonic()
    handle = handle_of(bounded)
    with pytest.raises(DrainError, match="1.ckpt: an earlier start left it, and parts of other nodes do not come"):
        handle.flush(60)
    assert handle.has_room(op_id(90))
    assert 1 <= time.monotonic() - began < 30
    assert [request.target for request in bounded.queue.requests()] == [op_id(1)] == [handle.given_up]
    # Its own are waited for: the other node may be slow.
    own = bounded.part("3.ckpt", 3, 0, world_size=2, run=ids.new_run_id())
    release(lock)
    drain(bounded).run(once=True)
    assert pending(bounded) == [op_id(2), own]
    lock = try_lock(bounded.root / LOCK_FILE)
    assert not handle.has_room(op_id(91))
    assert handle.given_up == ""
    release(lock)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_has_become_complete_is_committed_in_place_of_being_given_up(nodes, store, handle_of, restarts, caplog):
    """A node that is slower than wait_timeout_s: the rank whose part has come is who asks for room, at that moment."""
    caplog.set_level("INFO")
    first, second = nodes
    handle = handle_of(first)
    for number in (1, 2):
        first.part(f"{number}.ckpt", number, 0)
    worker = drain(first, clock=Clock(LATER))
    until(lambda: worker.run(once=True) and len(first.states()) == 2, "both are late")
    # Their failures are noted once, so a drain that still lives does not say them again to the next start.
    handle = handle_of(first) if restarts else handle
    second.part("1.ckpt", 1, 1)
    assert drain(second).run(once=True)
    assert handle.has_room(op_id(90))
    assert handle.given_up == op_id(1)
    assert (drain(first) if restarts else worker).run(once=True)
    assert first.states()[op_id(1)] == "committed"
    assert readable(store, "1.ckpt") == 1
    assert pending(first) == [op_id(2)]
    assert "1.ckpt is not given up: its last parts have come" in caplog.text
    # A save that still lacks a part is given up, or the queue would grow.
    first.part("3.ckpt", 3, 0)
    assert handle.has_room(op_id(91))
    assert (drain(first) if restarts else worker).run(once=True)
    assert first.states()[op_id(2)] == "skipped"


@pytest.mark.parametrize("what", ["upload", "list"])
def test_what_is_complete_and_can_not_be_committed_is_spared_once(nodes, store, what, caplog):
    """Or else the queue would grow. Nor does a look that fails keep it, or the drain busy."""
    caplog.set_level("INFO")
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    assert drain(first).run(once=True)
    second.part("1.ckpt", 1, 1)
    assert drain(second).run(once=True)
    worker = drain(first, refusing(store, lambda asked, _: asked == what, Injected("away")), clock=Clock(LATER))
    for state in ("failed", "skipped") if what == "upload" else ("skipped",):
        cancel = first.cancel(op_id(1))
        assert worker.run(once=True)
        assert (first.states()[op_id(1)], first.states()[cancel]) == (state, "committed")
    assert caplog.text.count("is not given up") == (what == "upload")


def test_what_an_earlier_start_left_incomplete_is_no_failure_of_this_one(memory_dir, store, handle_of, caplog):
    node, counts, now = Node(memory_dir, store.url), Counter(), ids.new_run_id()
    node.part("1.ckpt", 1, 0, world_size=2)
    node.queue.submit(Request(op_id(2), "alias", "last.ckpt", node.dirpath, "1.ckpt"))
    handle, announcer = handle_of(node), Announcer(node.config, get_logger("default"), counts)
    node.part("3.ckpt", 3, 0, world_size=2, run=now)
    told = []
    for number, action, name in ((1, "save", "1.ckpt"), (2, "alias", "last.ckpt"), (3, "save", "3.ckpt")):
        op = ids.save_id(now, number) if number > 2 else op_id(number)
        late = Outcome(op, action, name, number, "failed", "parts have not come", "DrainError")
        node.queue.finish(late, final=False)
        announcer.look(handle, leads=True)
        told.append(announcer.first_failure())
        assert (told[-1] is not None, counts["failed"]) == (number == 3, int(number == 3))
    assert "3.ckpt did not reach the durable tier: parts have not come" in str(told[2])
    assert [(each.levelname, each.message.partition(" did not")[0]) for each in caplog.records] == [
        ("WARNING", "Step 1: of an earlier start: 1.ckpt"),
        ("WARNING", "Step 2: of an earlier start: alias of last.ckpt"),
        ("ERROR", "Step 3: 3.ckpt"),
    ]


# ----------------------------------------------------------------------------------- its leaving
def test_a_drain_leaves_a_save_that_waits_to_the_next_in_the_end(nodes, store, caplog):
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    assert drain(first, clock=Clock(Timing(drain_give_up_s=0.3))).run()
    assert "leaving 1 operations" in caplog.text
    second.part("1.ckpt", 1, 1)
    assert drain(second).run()
    assert drain(first).run()
    assert readable(store, "1.ckpt") == 1


def test_a_drain_without_a_trainer_waits_for_parts_longer_than_it_retries_what_fails(memory_dir, store, nodes):
    first, second = (Node(f"{memory_dir}/node{number}", store.url, wait_timeout_s=60) for number in range(2))
    own = first.save("own.ckpt", b"what nobody takes")
    first.part("2.ckpt", 2, 0)
    locked, soon = refusing(store, lambda what, key: key == "own.ckpt"), Clock(Timing(drain_give_up_s=0.1))
    with working(first, locked, stay=False, clock=soon) as thread:
        until(lambda: own in first.states(), "the other is told to have failed")
        thread.join(0.5)
        assert thread.is_alive()
        second.part("2.ckpt", 2, 1)
        drain(second).run(once=True)
        thread.join(30)
        assert not thread.is_alive()
    assert readable(store, "2.ckpt") == 2
