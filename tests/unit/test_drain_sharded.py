"""Drains of sharded checkpoints: two ranks of a node, two nodes with a drain each, and one durable tier."""

import contextlib
import logging
import os
import threading
import time

import pytest
from support.draining import Node, names
from support.restoring import of_a_newer_release
from support.sharded import FlatStore, named, objects, readable
from support.story import op_id

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.errors import DrainError, StoreAccessError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.testing.faulty import FaultyStore

LOG = logging.getLogger("test")


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(str(tmp_path / "durable"))


@pytest.fixture
def nodes(memory_dir, store):
    """Two nodes: the first holds the coordinator, rank 0."""
    made = []
    for number in range(2):
        folder = f"{memory_dir}/node{number}"
        os.mkdir(folder)
        made.append(Node(folder, store.url, wait_timeout_s=1))
    return made


def drain(node, store=None, **options):
    opened = {"open_store": lambda config, dirpath: store} if store is not None else {}
    return Drain(node.root, logger=LOG, **opened, **options)


def part_op(number, rank):
    return ids.part_op_id(op_id(number), rank, commits=False)


def left(store):
    """Objects of the durable tier that no manifest names, but for manifests themselves."""
    return sorted(set(objects(store)) - set(named(store)))


def pending(node):
    return [stored.op_id for stored in node.tier.parts() if stored.pending]


@contextlib.contextmanager
def working(node, store=None):
    """A drain at work beside the block."""
    stop = threading.Event()
    thread = threading.Thread(target=drain(node, store, stop=stop, stay=True).run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def until(condition, what, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)


# --------------------------------------------------------------------------------- one node
def test_two_ranks_of_a_node_are_one_checkpoint(nodes, store):
    node, _ = nodes
    # The coordinator's part is committed to memory last, but who uploads first is the drain's matter.
    for number in (1, 2):
        node.part(f"{number}.ckpt", number, 1)
        node.part(f"{number}.ckpt", number, 0)
    last, old = node.alias("last.ckpt", "2.ckpt"), node.delete("1.ckpt")
    worker = drain(node)
    assert worker.run(once=True)
    assert node.states() == dict.fromkeys([op_id(1), part_op(1, 1), op_id(2), part_op(2, 1), last, old], "committed")
    assert names(store) == ["2.ckpt", "last.ckpt"]
    assert readable(store, "2.ckpt") == readable(store, "last.ckpt") == 2
    assert left(store) == []
    assert pending(node) == []
    counters = node.queue.progress().counters
    assert (counters["committed"], counters["uploaded"]) == (4, 2)
    # For each save one look, one check of what is there, and one look for what is left of others; once, a look for
    # what an earlier release left; and the delete looks for pins before the manifest goes and behind that.
    assert counters["requests.list"] == 2 * 3 + 1 + 2


def test_a_manifest_of_a_newer_release_beside_it_does_not_fail_a_commit(nodes, store, caplog):
    node, _ = nodes
    for number in (1, 2):
        for rank in (1, 0):
            node.part(f"{number}.ckpt", number, rank)
        assert drain(node).run(once=True)
        assert node.states()[op_id(number)] == "committed"
        key = ids.manifest_key("1.ckpt")
        store.put(key, of_a_newer_release(store.get(key)))
    assert "could not remove what is left of incomplete saves" in caplog.text
    assert readable(store, "2.ckpt") == 2


def test_full_and_sharded_share_a_node_and_a_name(memory_dir):
    store = FlatStore(f"{memory_dir}/durable")
    node = Node(memory_dir, "s3://unused/but/opened/by/us")
    node.save("a.ckpt", b"full")
    drain(node, store).run(once=True)
    node.part("a.ckpt", 2, 1)
    node.part("a.ckpt", 2, 0)
    drain(node, store).run(once=True)
    assert readable(store, "a.ckpt") == 2
    node.save("a.ckpt", b"full again")
    drain(node, store).run(once=True)
    assert readable(store, "a.ckpt") == 3
    assert left(store) == []


@pytest.mark.parametrize("n", range(1, 26))
def test_a_store_that_fails_anywhere_leaves_what_the_next_drain_finishes(n, memory_dir):
    store = FlatStore(f"{memory_dir}/durable")
    node = Node(memory_dir, store.url)
    faulty = FaultyStore(store, fail_at=n)
    node.part("a.ckpt", 1, 1)
    node.part("a.ckpt", 1, 0)
    drain(node, store).run(once=True)
    ops = [
        node.part("a.ckpt", 2, 1, suffix="-2"),
        node.part("a.ckpt", 2, 0, suffix="-2"),
        node.alias("last.ckpt", "a.ckpt"),
    ]
    drain(node, faulty).run(once=True)
    assert readable(store, "a.ckpt") in (1, 2)
    drain(node, store).run(once=True)
    assert {node.states()[op] for op in ops} == {"committed"}
    assert readable(store, "a.ckpt") == readable(store, "last.ckpt") == 2
    assert left(store) == []
    assert pending(node) == []


# -------------------------------------------------------------------------------- two nodes
def test_parts_of_two_nodes_meet_on_the_durable_tier(nodes, store):
    """Whichever drain is first: the coordinator's goes on with other work and commits when all is there."""
    first, second = nodes
    for number in (1, 2):
        first.part(f"{number}.ckpt", number, 0)
        second.part(f"{number}.ckpt", number, 1)
    full = first.save("own.ckpt", b"of one rank")
    with working(first):
        until(lambda: first.states().get(full) == "committed", "what needs no other node is done")
        assert names(store) == ["own.ckpt"]
        assert drain(second).run(once=True)
        assert second.states() == {part_op(1, 1): "committed", part_op(2, 1): "committed"}
        until(lambda: not pending(first), "all is committed")
        assert first.states() == dict.fromkeys([op_id(1), op_id(2), full], "committed")
    assert [readable(store, f"{number}.ckpt") for number in (1, 2)] == [1, 2]
    assert left(store) == []


def test_parts_of_two_nodes_meet_on_s3(memory_dir, s3_url):
    nodes = []
    for number in (0, 1):
        os.mkdir(f"{memory_dir}/{number}")
        nodes.append(Node(f"{memory_dir}/{number}", s3_url))
    store = open_store(nodes[0].config)
    with working(nodes[0]), working(nodes[1]):
        for number, name in enumerate(("a.ckpt", "a.ckpt", "b.ckpt"), start=1):
            for rank in (3, 2, 1, 0):
                nodes[rank % 2].part(name, number, rank, world_size=4, suffix=f"-{number}")
        until(lambda: not pending(nodes[0]), "all is committed")
        nodes[0].delete("a.ckpt")
        until(lambda: names(store) == ["b.ckpt"], "the older one goes")
    assert readable(store, "b.ckpt") == 3
    assert left(store) == []
    store.close()


def test_a_save_that_became_whole_meanwhile_goes_before_a_later_one(nodes, store):
    """The later one must not take it for one that never will be whole, and clear it up."""
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    worker = drain(first)
    worker.run(once=True)
    assert set(worker._executor.begun) == {op_id(1)}
    worker._executor.begun[op_id(1)].due += 3600
    for number in (1, 2):
        second.part(f"{number}.ckpt", number, 1)
    drain(second).run(once=True)
    first.part("2.ckpt", 2, 0)
    worker.run(once=True)
    assert first.states() == dict.fromkeys([op_id(1), op_id(2)], "committed")
    assert [readable(store, f"{number}.ckpt") for number in (1, 2)] == [1, 2]


def test_a_part_that_never_comes_is_told_and_the_next_save_clears_it_up(nodes, store):
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    second.part("1.ckpt", 1, 1)
    drain(second).run(once=True)
    drain(first).run(once=True)
    first.part("2.ckpt", 2, 0)
    held = first.delete("1.ckpt")
    with working(first):
        until(lambda: first.queue.outcome(op_id(2)), "it is told")
    outcome = first.queue.outcome(op_id(2))
    assert (outcome.state, outcome.error_type) == ("failed", "DrainError")
    assert "the parts of 1 of 2 ranks have not come within 1 s: 1" in outcome.error
    assert names(store) == ["1.ckpt"]
    assert first.queue.outcome(held) is None
    assert left(store), "its parts wait for the last one"
    first.part("4.ckpt", 4, 0)
    second.part("4.ckpt", 4, 1)
    drain(second).run(once=True)
    drain(first).run(once=True)
    assert first.states() == {op_id(1): "committed", op_id(2): "skipped", held: "committed", op_id(4): "committed"}
    assert names(store) == ["4.ckpt"]
    assert readable(store, "4.ckpt") == 4
    assert left(store) == []
    assert pending(first) == pending(second) == []


@pytest.mark.matrix
def test_a_part_that_comes_late_after_all_makes_the_save_whole(nodes, store):
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    with working(first):
        until(lambda: first.states() == {op_id(1): "failed"}, "it is told")
        second.part("1.ckpt", 1, 1)
        drain(second).run(once=True)
        # Anything new is a reason to look again.
        first.save("own.ckpt", b"new")
        until(lambda: not pending(first), "both are there")
    assert first.states()[op_id(1)] == "committed"
    assert readable(store, "1.ckpt") == 1


def test_a_rank_that_died_before_the_coordinator_was_told_leaves_nothing_for_long(nodes, store):
    """No coordinator's part: nobody waits, and the next save of the run clears up."""
    first, second = nodes
    first.part("1.ckpt", 1, 2, world_size=3)
    second.part("1.ckpt", 1, 1, world_size=3)
    for node in nodes:
        assert drain(node).run()
    assert names(store) == []
    assert left(store)
    first.part("2.ckpt", 2, 0)
    second.part("2.ckpt", 2, 1)
    drain(second).run()
    drain(first).run()
    assert readable(store, "2.ckpt") == 2
    assert left(store) == []


class Refusing:
    """A store that refuses the files of some names."""

    def __init__(self, store, *names):
        self._store = store
        self._names = names

    def upload(self, key, data, **options):
        if key.startswith(self._names):
            raise StoreAccessError("no")
        self._store.upload(key, data, **options)

    def upload_if(self, key, data, expected, *, look=None, **options):
        self.upload(key, data, **options)

    def __getattr__(self, name):
        return getattr(self._store, name)


class Keeping(Refusing):
    """A store that removes nothing."""

    def delete(self, key):
        raise StoreAccessError("no")

    def delete_if(self, key, expected):
        self.delete(key)


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
    assert drain(node, Keeping(store)).run(once=True)
    # What is to go is a request of its own, by the id of the save that was replaced; one after the other.
    assert node.states() == {**first, **later[0], **later[1], op_id(1): "failed"}
    assert [each.action for each in node.queue.look(node.tier)] == ["delete", "delete"]
    assert pending(node) == []
    assert named(store) and left(store)
    save(4)
    assert drain(node).run(once=True)
    assert node.queue.look(node.tier) == []
    assert set(node.states().values()) == {"committed"}
    assert readable(store, "step_1") is not None
    assert left(store) == []


class Killing(Refusing):
    def list(self, prefix):
        """Its drain is killed as it clears up behind a commit."""
        if prefix != ".tiered/parts/":
            return self._store.list(prefix)
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_part_that_no_store_takes_is_superseded_by_that_of_the_next_save(nodes, store, is_killed):
    first, second = nodes
    for number in (1, 2):
        second.part(f"{number}.ckpt", number, 1)
        first.part(f"{number}.ckpt", number, 0)
    drain(second, Refusing(store, "1.ckpt")).run(once=True)
    assert second.states() == {part_op(1, 1): "skipped", part_op(2, 1): "committed"}
    if is_killed:
        with pytest.raises(KeyboardInterrupt):
            drain(first, Killing(store)).run(once=True)
    drain(first).run(once=True)
    assert first.states() == {op_id(1): "skipped", op_id(2): "committed"}
    assert names(store) == ["2.ckpt"]
    assert left(store) == []


def test_looks_become_rare(nodes, store):
    first, _ = nodes
    for number in (1, 2, 3):
        first.part(f"{number}.ckpt", number, 0)
    with working(first):
        until(lambda: len(first.states()) == 3, "all are told to have failed")
    # Three saves, 1 s: looks at 0, 0.1, 0.3, 0.7, 1.5 s, one of them also for parts of an earlier release.
    assert first.queue.progress().counters["requests.list"] <= 3 * (5 + 1)


# ------------------------------------------------------------------------------ the trainer's side
def test_max_pending_counts_saves_and_a_cancel_takes_all_their_parts(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "durable"), max_pending=2, on_pending="skip")
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
        with pytest.raises(DrainError, match=r"have not come within 1 s: 1|not durable"):
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
