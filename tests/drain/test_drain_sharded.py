"""Drains of sharded checkpoints: several ranks, nodes and groups, late parts, requests; and as trainers see them."""

import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.committing import save, swept
from support.draining import LOG, Node, drain, names, working
from support.faulty import FaultyStore, Injected, refusing
from support.sharded import named, objects, readable
from support.story import op_id
from support.waiting import until

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.status import Announcer
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, Drain
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.logs import get_logger
from tiered_checkpoint_io.memory.node import release, try_lock
from tiered_checkpoint_io.model import ids


def part_op(number, rank):
    return ids.part_op_id(op_id(number), rank, commits=False)


def left(store):
    """Returns objects of the durable tier that no manifest names, except manifests."""
    return sorted(set(objects(store)) - set(named(store)))


def left_by_sweep(store):
    swept(store)
    return left(store)


def pending(node):
    return [stored.op_id for stored in node.tier.parts() if stored.pending]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_is_durable_whether_or_not_what_it_replaced_can_be_removed(world_size, nodes, store):
    node = nodes[0]

    def save(number):
        options = {"world_size": world_size, "suffix": f"-{number}"}
        ops = [node.part("step_1", number, rank, **options) for rank in range(world_size)]
        return dict.fromkeys(ops, "committed")

    first = save(1)
    assert drain(node).run(once=True)
    later = [save(2), save(3)]
    assert drain(node, refusing(store, lambda what, _: what == "delete")).run(once=True)
    assert node.states() == {**first, **later[0], **later[1]}
    assert pending(node) == [] and node.queue.look(node.tier) == []
    assert readable(store, "step_1") == 3
    assert left(store) and left_by_sweep(store) == []


def test_a_part_that_never_comes_is_reported_and_the_next_save_clears_it_up(nodes, store):
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    second.part("1.ckpt", 1, 1)
    drain(second).run(once=True)
    drain(first).run(once=True)
    first.part("2.ckpt", 2, 0)
    held, before = first.delete("1.ckpt"), first.queue.progress().counters["requests.list"]
    with working(first):
        until(lambda: first.queue.outcome(op_id(2)), "it is reported")
    # Of the save, looks at 0, 0.1, 0.3, 0.7, 1.5 s; and at first, whether it is to be refreshed, and the sweep.
    assert first.queue.progress().counters["requests.list"] <= before + 5 + 1 + 3
    outcome = first.queue.outcome(op_id(2))
    assert (outcome.state, outcome.error_type) == ("failed", "DrainError")
    assert "the parts of 1 of 2 ranks are missing, and none of them has come for 1 s: 1" in outcome.error
    assert names(store) == ["1.ckpt"]
    assert first.queue.outcome(held) is None
    assert left(store), "its parts wait for the last one"
    first.part("4.ckpt", 4, 0)
    second.part("4.ckpt", 4, 1)
    drain(second).run(once=True)
    drain(first).run(once=True)
    assert first.states() == {op_id(1): "committed", op_id(2): "skipped", held: "skipped", op_id(4): "committed"}
    assert names(store) == ["1.ckpt", "4.ckpt"]
    assert readable(store, "4.ckpt") == 4
    assert left_by_sweep(store) == []
    assert pending(first) == pending(second) == []


BEFORE = 6


class Asked(FaultyStore):
    """Counts lists, reads of manifests, and looks for uploads that were given up."""

    def __init__(self, store):
        super().__init__(store)
        self.take()

    def _count(self, operation, key):
        if operation == "list":
            self._now.lists[key] += 1
        elif operation == "get" and key.startswith(ids.MANIFEST_PREFIX):
            self._now.gets[ids.name_from_manifest_key(key)] += 1
        return False

    def abort_stale_uploads(self):
        self._now.looks += 1

    def take(self):
        """Returns the counts since the last call."""
        taken, self._now = getattr(self, "_now", None), SimpleNamespace(lists=Counter(), gets=Counter(), looks=0)
        return taken


@pytest.fixture
def world(store, memory_dir):
    """Returns a durable tier with checkpoints, and two nodes with a drain each; the first has the coordinator."""
    for number in range(1, BEFORE + 1):
        save(store, f"c{number}", number, kind="sharded")
    for path in Path(store.url, ids.MANIFEST_PREFIX).iterdir():
        # A new object is read again for a while.
        os.utime(path, (1, 1))
    nodes, asked, drains = [], [], []
    for number in range(2):
        os.mkdir(f"{memory_dir}/{number}")
        nodes.append(Node(f"{memory_dir}/{number}", store.url, retention={"latest": BEFORE + 9}))
        asked.append(Asked(store))
        drains.append(Drain(nodes[-1].root, logger=LOG, open_store=lambda *_, of=asked[-1]: of))
    return store, nodes, asked, drains


def test_a_durable_step_costs_as_many_requests_however_many_checkpoints_there_are(world):
    store, nodes, asked, drains = world
    found = []
    for number in range(BEFORE + 1, BEFORE + 4):
        for rank in (1, 0):
            nodes[rank].part(f"c{number}", number, rank)
            if rank == 0:
                nodes[0].number = 10 * number
                nodes[0].request("retain", "retention/mine", op_id(number))
            assert drains[rank].run(once=True)
        found.append([each.take() for each in asked])
        assert f"c{number}" in names(store)
    (first, _), (second, other), (third, _) = found
    # Once, the sweep reads all manifests, and retention none of them again.
    old = {f"c{number}": 1 for number in range(1, BEFORE + 1)}
    assert {name: count for name, count in first.gets.items() if name in old} == old
    assert not old.keys() & {*second.gets, *third.gets}
    # The descriptions and files of this one; manifests, for retention, which reads the one lease.
    assert second.lists.total() == third.lists.total() == 3, (second, third)
    assert not other.lists, "only the coordinator's drain looks at what others have sent"
    assert [sum(node.looks for node in each) for each in zip(*found, strict=True)] == [3, 0], (
        "one drain, once it is open"
    )


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


def test_what_an_earlier_start_left_incomplete_is_no_failure_of_this_one(memory_dir, store, handle_of, caplog):
    node, counts, now = Node(memory_dir, store.url), Counter(), ids.new_run_id()
    node.part("1.ckpt", 1, 0, world_size=2)
    node.queue.submit(Request(op_id(2), "alias", "last.ckpt", node.dirpath, "1.ckpt"))
    handle, announcer = handle_of(node), Announcer(node.config, get_logger("default"), counts)
    node.part("3.ckpt", 3, 0, world_size=2, run=now)
    failures = []
    for number, action, name in ((1, "save", "1.ckpt"), (2, "alias", "last.ckpt"), (3, "save", "3.ckpt")):
        op = ids.save_id(now, number) if number > 2 else op_id(number)
        late = Outcome(op, action, name, number, "failed", "parts have not come", "DrainError")
        node.queue.finish(late, final=False)
        announcer.look(handle, leads=True)
        failures.append(announcer.first_failure())
        assert (failures[-1] is not None, counts["failed"]) == (number == 3, int(number == 3))
    assert "3.ckpt did not reach the durable tier: parts have not come" in str(failures[2])
    assert [(each.levelname, each.message.partition(" did not")[0]) for each in caplog.records] == [
        ("WARNING", "Step 1: of an earlier start: 1.ckpt"),
        ("WARNING", "Step 2: of an earlier start: alias of last.ckpt"),
        ("ERROR", "Step 3: 3.ckpt"),
    ]


def test_a_damaged_description_of_a_save_that_waits_holds_up_no_later_one(nodes, store):
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    drain(first).run(once=True)
    store.put(ids.description_key(op_id(1), 1), b"{")
    first.part("2.ckpt", 2, 0)
    second.part("2.ckpt", 2, 1)
    for node in (second, first):
        drain(node).run(once=True)
    assert first.states()[op_id(2)] == "committed"
    assert names(store) == ["2.ckpt"]


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
