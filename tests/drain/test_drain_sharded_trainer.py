"""Drains of sharded checkpoints, as trainers see them: what is queued and waited for, and when a drain leaves."""

# ruff: noqa: F811 - a fixture of another module is an argument here

import contextlib
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
from support.draining import Node
from support.sharded import readable
from support.story import op_id
from support.supporting import build

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain import client
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.status import Announcer
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE
from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.arrivals import Arrivals
from tiered_checkpoint_io.errors import DrainError, StoreError
from tiered_checkpoint_io.logs import get_logger

from .test_drain_sharded import LOG, Refusing, drain, nodes, part_op, pending, store, until, working  # noqa: F401 - fixtures


def test_max_pending_counts_saves_and_a_cancel_takes_all_their_parts(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "durable"), max_pending=2, pending_timeout_s=1)
    handle = DrainHandle(node.tier, node.config, LOG)
    lock = try_lock(node.root / LOCK_FILE)
    for rank in (3, 2, 1, 0):
        node.part("1.ckpt", 1, rank, world_size=5)
    assert handle.has_room(op_id(90))
    assert handle.pending_saves() == [op_id(1)]
    for rank in (3, 2, 1, 0):
        node.part("2.ckpt", 2, rank, world_size=5)
    assert not handle.has_room(op_id(91))
    node.queue.finish(Outcome(part_op(1, 2), "part", "1.ckpt", 1, "failed", "no"), final=False)
    assert handle.has_room(op_id(92))
    assert [request.target for request in node.queue.requests()] == [op_id(1)]
    release(lock)
    drain(node).run(once=True)
    cancelled = [op_id(1), *(part_op(1, rank) for rank in (1, 2, 3))]
    assert {node.states()[op] for op in cancelled} == {"skipped"}
    assert pending(node) == [op_id(2)]
    handle.close(timeout_s=10)


def test_what_waits_for_the_parts_of_a_lost_node_does_not_hold_up_the_next_start(memory_dir, tmp_path):
    """As long as they may come is 30 minutes by default; the queue is full, as it is where uploads are what takes long."""
    node = Node(memory_dir, str(tmp_path / "durable"), max_pending=2, pending_timeout_s=1, wait_timeout_s=60)
    for number in (1, 2):
        node.part(f"{number}.ckpt", number, 0, world_size=2)
    drain(node).run(once=True)
    assert pending(node) == [op_id(1), op_id(2)]
    lock, began = try_lock(node.root / LOCK_FILE), time.monotonic()
    with pytest.raises(DrainError, match="1.ckpt: an earlier start left it, and parts of other nodes do not come"):
        DrainHandle(node.tier, node.config, LOG).flush(60)
    assert 1 <= time.monotonic() - began < 20
    handle, began = DrainHandle(node.tier, node.config, LOG), time.monotonic()
    assert handle.has_room(op_id(90))
    assert 1 <= time.monotonic() - began < 20
    assert [request.target for request in node.queue.requests()] == [op_id(1)] == [handle.given_up]
    # Its own are waited for: the other node may be slow.
    node.part("3.ckpt", 3, 0, world_size=2)
    release(lock)
    drain(node).run(once=True)
    assert pending(node) == [op_id(2), op_id(3)]
    with_bound = build(replace, node.config, wait_timeout_s=3)
    handle._config, lock = with_bound, try_lock(node.root / LOCK_FILE)
    assert not handle.has_room(op_id(91))
    assert handle.given_up == ""
    release(lock)
    handle.close(timeout_s=10)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_has_become_complete_is_committed_in_place_of_being_given_up(nodes, store, restarts, caplog):
    """A node that is slower than wait_timeout_s: the rank whose part has come is who asks for room, at that moment."""
    caplog.set_level("INFO")
    first, second = nodes
    handle = DrainHandle(first.tier, build(replace, first.config, max_pending=2), LOG)
    for number in (1, 2):
        first.part(f"{number}.ckpt", number, 0)
    worker = drain(first, clock=Clock(Timing(gather_max_s=0.2, redo_max_s=3600, redo_permanent_s=3600)))
    with working(first) if restarts else contextlib.nullcontext():
        until(lambda: (restarts or worker.run(once=True)) and len(first.states()) == 2, "both are late")
    second.part("1.ckpt", 1, 1)
    assert drain(second).run(once=True)
    assert handle.has_room(op_id(90))
    assert handle.given_up == op_id(1)
    assert (drain(first) if restarts else worker).run(once=True)
    assert first.states()[op_id(1)] == "committed"
    assert readable(store, "1.ckpt") == 1
    assert pending(first) == [op_id(2)]
    assert "1.ckpt is not given up: its last parts have come" in caplog.text
    # What lacks a part still is given up, or the queue would grow.
    first.part("3.ckpt", 3, 0)
    assert handle.has_room(op_id(91))
    assert (drain(first) if restarts else worker).run(once=True)
    assert first.states()[op_id(2)] == "skipped"
    handle.close(timeout_s=10)


def test_what_is_complete_and_can_not_be_committed_is_spared_once(nodes, store, monkeypatch, caplog):
    """Or else the queue would grow. Nor does a look that fails keep it, or the drain busy."""
    caplog.set_level("INFO")
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    worker = drain(first, clock=Clock(Timing(redo_first_s=3600, redo_max_s=3600, redo_permanent_s=3600)))
    assert worker.run(once=True)
    second.part("1.ckpt", 1, 1)
    assert drain(second).run(once=True)
    away = Mock(side_effect=StoreError("away", reason="unavailable"))
    monkeypatch.setattr(commit, "put_part", away)
    for number, state in ((2, "failed"), (3, "skipped")):
        first.cancel(op_id(1))
        assert worker.run(once=True)
        assert first.states()[op_id(1)] == state
    assert caplog.text.count("is not given up") == away.call_count == 1
    first.part("4.ckpt", 4, 0)
    monkeypatch.undo()
    assert worker.run(once=True)
    monkeypatch.setattr(Arrivals, "look", Mock(side_effect=RuntimeError("no")))
    cancel = first.cancel(op_id(4))
    assert worker.run(once=True)
    assert (first.states()[op_id(4)], first.states()[cancel]) == ("skipped", "committed")


def test_a_save_that_an_earlier_start_found_late_makes_room_for_the_next_one(nodes, store):
    """Its failure is noted once, so the drain, which may still live, does not say it to this start again."""
    first, _ = nodes
    first.part("1.ckpt", 1, 0)
    worker = drain(first, clock=Clock(Timing(gather_first_s=0.2)))
    until(lambda: worker.run(once=True) and first.states(), "it is late")
    handle = DrainHandle(first.tier, build(replace, first.config, max_pending=1), LOG)
    assert handle.has_room(op_id(90))
    assert handle.given_up == op_id(1)
    handle.close(timeout_s=10)


def test_what_an_earlier_start_left_incomplete_is_no_failure_of_this_one(memory_dir, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(client, "_BEGAN", op_id(3))
    node, counts = Node(memory_dir, str(tmp_path / "durable")), Counter()
    node.part("1.ckpt", 1, 0, world_size=2)
    node.queue.submit(Request(op_id(2), "alias", "last.ckpt", node.dirpath, "1.ckpt"))
    handle = DrainHandle(node.tier, node.config, LOG)
    announcer = Announcer(node.config, get_logger("default"), counts)
    node.part("3.ckpt", 3, 0, world_size=2)
    named = ((1, "save", "1.ckpt"), (2, "alias", "last.ckpt"), (3, "save", "3.ckpt"), (4, "alias", "last.ckpt"))
    told = []
    for number, action, name in named:
        late = Outcome(op_id(number), action, name, number, "failed", "parts have not come", "DrainError")
        node.queue.finish(late, final=False)
        announcer.look(handle, leads=True)
        told.append(announcer.first_failure())
        # An alias is neither a save nor an upload.
        assert (told[-1] is not None, counts["failed"]) == (number >= 3, int(number >= 3))
    assert "3.ckpt did not reach the durable tier: parts have not come" in str(told[2])
    assert [(each.levelname, each.message.partition(" did not")[0]) for each in caplog.records] == [
        ("WARNING", "Step 1: of an earlier start: 1.ckpt"),
        ("WARNING", "Step 2: of an earlier start: alias of last.ckpt"),
        ("ERROR", "Step 3: 3.ckpt"),
        ("ERROR", "Step 4: alias of last.ckpt"),
    ]
    handle.close(timeout_s=10)


@pytest.mark.matrix
def test_a_trainer_waits_for_its_rank_s_part_and_for_the_save(nodes, store):
    first, second = nodes
    handles = [DrainHandle(node.tier, node.config, LOG) for node in nodes]
    try:
        own, other = first.part("1.ckpt", 1, 0), second.part("1.ckpt", 1, 1)
        for handle in handles:
            handle.start()
        assert handles[1].wait(other, 60).action == "part"
        assert handles[0].wait(own, 60).state == "committed"
        assert readable(store, "1.ckpt") == 1
        first.part("2.ckpt", 2, 0)
        with pytest.raises(DrainError, match=r"none of them has come for 1 s: 1|not durable"):
            handles[0].flush(30)
        second.part("2.ckpt", 2, 1)
        handles[1].flush(30)
        # Something new to do is a reason to look again.
        handles[0].submit(Request(op_id(3), "alias", "last.ckpt", first.dirpath, "2.ckpt"))
        handles[0].wait(op_id(3), 60)
        assert readable(store, "last.ckpt") == 2
    finally:
        for handle in handles:
            handle.close(timeout_s=30)


def test_a_drain_stays_for_a_save_that_waits_and_leaves_it_to_the_next_in_the_end(nodes, store, caplog):
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    assert drain(first, clock=Clock(Timing(drain_give_up_s=0.3))).run()
    assert "leaving 1 operations" in caplog.text
    second.part("1.ckpt", 1, 1)
    trainer = try_lock(second.root / TRAINERS_FILE, shared=True)
    thread = threading.Thread(target=drain(second).run)
    thread.start()
    until(lambda: not pending(second), "its part is there")
    release(trainer)
    thread.join(10)
    assert drain(first).run()
    assert readable(store, "1.ckpt") == 1


def test_a_drain_without_a_trainer_stays_while_parts_may_come_and_no_longer(nodes, store):
    first, second = nodes
    own = first.save("own.ckpt", b"what nobody takes")
    first.part("2.ckpt", 2, 0)
    thread = threading.Thread(target=drain(first, Refusing(store, "own.ckpt")).run)
    thread.start()
    until(lambda: own in first.states(), "the other is told to have failed")
    second.part("2.ckpt", 2, 1)
    drain(second).run()
    thread.join(10)
    assert not thread.is_alive()
    assert first.states() == {own: "skipped", op_id(2): "committed"}
    first.part("3.ckpt", 3, 0)
    assert drain(first).run()
    assert first.states()[op_id(3)] == "failed"


def test_a_drain_without_a_trainer_waits_for_parts_longer_than_it_retries_what_fails(memory_dir, store):
    folders = [f"{memory_dir}/node{number}" for number in range(2)]
    for folder in folders:
        os.mkdir(folder)
    first, second = (Node(folder, store.url, wait_timeout_s=60) for folder in folders)
    first.part("1.ckpt", 1, 0)
    thread = threading.Thread(target=drain(first, clock=Clock(Timing(drain_give_up_s=0.1))).run)
    thread.start()
    thread.join(1)
    assert thread.is_alive()
    second.part("1.ckpt", 1, 1)
    drain(second).run(once=True)
    thread.join(30)
    assert not thread.is_alive()
    assert readable(store, "1.ckpt") == 1
