"""Drains of sharded checkpoints: two ranks of a node, two nodes with a drain each, and one durable tier."""

import contextlib
import logging
import os
import threading
import time

import pytest
from support.committing import swept
from support.draining import Node, names
from support.restoring import of_a_newer_release
from support.sharded import FlatStore, named, objects, readable
from support.story import op_id

from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.directory import DirectoryStore

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


def left_by_sweep(store):
    swept(store)
    return left(store)


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


class SlowStore(DirectoryStore):
    """Takes 0.2 s for the files of a part."""

    def upload(self, key, *args, **kwargs):
        time.sleep(0.2 if not key.startswith(".tiered/") else 0.0)
        return super().upload(key, *args, **kwargs)


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
    # For each save one look, and one check of what is there; after the first the sweep, with a look at the time and at
    # the manifests. The delete looks for holds before the manifest goes and behind that. At first, both saves are alive.
    assert counters["requests.list"] == 2 * 2 + 3 + 2 + 2


def test_a_manifest_of_a_newer_release_beside_it_does_not_fail_a_commit(nodes, store):
    node, _ = nodes
    earlier, now = drain(node), drain(node)
    for number, worker in ((1, earlier), (2, now), (3, now)):
        for rank in (1, 0):
            node.part(f"{number}.ckpt", number, rank)
        assert worker.run(once=True)
        assert node.states()[op_id(number)] == "committed"
        key = ids.manifest_key("1.ckpt")
        store.put(key, of_a_newer_release(store.get(key)))
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


def test_a_commit_that_waited_tells_its_own_sending_and_the_whole_checkpoint_apart(nodes, store, caplog):
    first, second = nodes
    caplog.set_level(logging.INFO)
    worker = drain(first, SlowStore(store.url))
    first.part("1.ckpt", 1, 0)
    assert worker.run(once=True)
    time.sleep(1.0)
    second.part("1.ckpt", 1, 1, size=50_000)
    drain(second).run(once=True)
    until(lambda: worker.run(once=True) and first.states().get(op_id(1)) == "committed", "it is committed")
    sizes = [stored.part.content.size for node in nodes for stored in node.tier.parts()]
    outcome = first.queue.outcome(op_id(1))
    assert outcome.seconds > 1.4, "from the first byte that was sent"
    assert outcome.bytes == sum(sizes)
    (event,) = (each for each in read_events(first.root) if each["event"] == "upload")
    assert (event["size_bytes"], 0.4 < event["seconds"] < 1.0) == (sizes[0], True), "of its part, without the wait"
    assert first.queue.progress().rate == pytest.approx(sizes[0] / event["seconds"], rel=0.01)
    (line,) = (each for each in caplog.messages if "is durable" in each)
    assert size_text(sum(sizes)) in line


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
    assert "the parts of 1 of 2 ranks are missing, and none of them has come for 1 s: 1" in outcome.error
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
    assert left_by_sweep(store) == []
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
    assert left_by_sweep(store) == []


class Refusing:
    """A store that refuses the files of some names."""

    def __init__(self, store, *names):
        self._store = store
        self._names = names

    def upload(self, key, data, **options):
        if key.startswith(self._names):
            raise StoreError("no", reason="access")
        self._store.upload(key, data, **options)

    def upload_if(self, key, data, expected, *, look=None, **options):
        self.upload(key, data, **options)

    def __getattr__(self, name):
        return getattr(self._store, name)


class Keeping(Refusing):
    """A store that removes nothing."""

    def delete(self, key):
        raise StoreError("no", reason="access")

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
    assert node.states() == {**first, **later[0], **later[1]}
    assert pending(node) == [] and node.queue.look(node.tier) == []
    assert readable(store, "step_1") == 3
    assert left(store) and left_by_sweep(store) == []


class Killing(Refusing):
    def list(self, prefix):
        """Its drain is killed as it clears up behind a commit."""
        if prefix != ids.SAVES_PREFIX:
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
    assert left_by_sweep(store) == []


def test_looks_become_rare(nodes, store):
    first, _ = nodes
    for number in (1, 2, 3):
        first.part(f"{number}.ckpt", number, 0)
    with working(first):
        until(lambda: len(first.states()) == 3, "all are told to have failed")
    # Three saves, 1 s: looks at 0, 0.1, 0.3, 0.7, 1.5 s; and at first, whether any of them is to be refreshed.
    assert first.queue.progress().counters["requests.list"] <= 3 * 5 + 3
