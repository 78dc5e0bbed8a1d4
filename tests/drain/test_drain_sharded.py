"""Drains of sharded checkpoints: ranks and nodes with a drain each, process groups, late parts; requests counted."""

import dataclasses
import logging
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.clocks import VirtualClock
from support.committing import save, swept
from support.draining import LOG, Node, drain, names, working
from support.faulty import FaultyStore, Injected, refusing
from support.restoring import of_a_newer_release
from support.sharded import make_part, named, objects, readable, views_of
from support.story import op_id
from support.waiting import until

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.engine.drain.unfinished import Unfinished
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.engine.durable.commit import put_part
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.errors import CorruptCheckpointError, DrainError
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.directory import DirectoryStore


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


# -------------------------------------------------------------------------------- two nodes
def test_parts_of_two_nodes_meet_on_s3(memory_dir, s3_url):
    """If the coordinator's drain is first, it does other work, and commits when all parts are there."""
    nodes = []
    for number in (0, 1):
        os.mkdir(f"{memory_dir}/{number}")
        nodes.append(Node(f"{memory_dir}/{number}", s3_url))
    store = open_store(nodes[0].config)
    with working(nodes[0]):
        for number, name in enumerate(("a.ckpt", "a.ckpt", "b.ckpt"), start=1):
            for rank in (3, 2, 1, 0):
                nodes[rank % 2].part(name, number, rank, world_size=4, suffix=f"-{number}")
        full = nodes[0].save("own.ckpt", b"of one rank")
        until(lambda: nodes[0].states().get(full) == "committed", "what needs no other node is done")
        assert names(store) == ["own.ckpt"]
        assert drain(nodes[1]).run(once=True)
        assert set(nodes[1].states().values()) == {"committed"}
        until(lambda: not pending(nodes[0]), "all is committed")
        nodes[0].delete("a.ckpt")
        until(lambda: names(store) == ["b.ckpt", "own.ckpt"], "the older one goes")
    assert readable(store, "b.ckpt") == 3
    assert left(store) == []
    store.close()


def test_a_commit_that_waited_tells_its_own_sending_and_the_whole_checkpoint_apart(nodes, store, caplog):
    first, second = nodes
    caplog.set_level(logging.INFO)
    clock = VirtualClock()

    class Slow(DirectoryStore):
        """Takes 10 s for each file of a part."""

        def upload(self, key, *args, **kwargs):
            clock.advance(0.0 if key.startswith(".tiered/") else 10.0)
            return super().upload(key, *args, **kwargs)

    worker = drain(first, Slow(store.url), clock=clock)
    first.part("1.ckpt", 1, 0)
    assert worker.run(once=True)
    clock.advance(100.0)
    second.part("1.ckpt", 1, 1, size=50_000)
    drain(second).run(once=True)
    assert worker.run(once=True)
    assert first.states() == {op_id(1): "committed"}
    sizes = [stored.part.content.size for node in nodes for stored in node.tier.parts()]
    outcome = first.queue.outcome(op_id(1))
    assert outcome.seconds >= 120, "from the first byte that was sent"
    assert outcome.bytes == sum(sizes)
    (event,) = (each for each in read_events(first.root) if each["event"] == "upload")
    assert (event["size_bytes"], 20 <= event["seconds"] < 40) == (sizes[0], True), "of its part, without the wait"
    assert first.queue.progress().rate == pytest.approx(sizes[0] / event["seconds"], rel=0.01)
    (line,) = (each for each in caplog.messages if "is durable" in each)
    assert size_text(sum(sizes)) in line


def test_a_save_that_became_whole_meanwhile_goes_before_a_later_one(nodes, store):
    """The later one must not take it for one that never will be whole, and clear it up."""
    first, second = nodes
    first.part("1.ckpt", 1, 0)
    worker = drain(first, clock=Clock(Timing(gather_first_s=3600, gather_max_s=3600)))
    worker.run(once=True)
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
    held, before = first.delete("1.ckpt"), first.queue.progress().counters["requests.list"]
    with working(first):
        until(lambda: first.queue.outcome(op_id(2)), "it is told")
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


def test_a_part_that_no_store_takes_is_superseded_by_that_of_the_next_save(nodes, store):
    first, second = nodes
    for number in (1, 2):
        second.part(f"{number}.ckpt", number, 1)
        first.part(f"{number}.ckpt", number, 0)
    # It does not wait, though no coordinator's part has come.
    assert drain(second, refusing(store, lambda what, key: what == "upload" and key.startswith("1.ckpt"))).run()
    assert second.states() == {part_op(1, 1): "skipped", part_op(2, 1): "committed"}
    drain(first).run(once=True)
    assert first.states() == {op_id(1): "skipped", op_id(2): "committed"}
    assert names(store) == ["2.ckpt"]
    assert left_by_sweep(store) == []


PATIENCE_S = 1800.0


@dataclasses.dataclass
class Hours:
    """A clock that only a test moves."""

    now: float = 0.0
    timing: Timing = dataclasses.field(default_factory=Timing)

    def monotonic(self):
        return self.now


def test_to_wait_is_no_failure_while_parts_come_and_one_failure_where_none_does(store):
    clock, begun = Hours(), Unfinished()
    parts = [make_part("a.ckpt", 1, rank, world_size=4) for rank in range(4)]

    def send(rank):
        put_part(store, parts[rank][0], views_of(parts[rank][1]))

    def look():
        try:
            return begun.gather(store, parts[0][0], PATIENCE_S, clock)
        except DrainError as late:
            begun[parts[0][0].save_id].failed(late, clock)
            return str(late)

    send(0)
    for rank in (1, 2):
        assert look() is None
        clock.now += PATIENCE_S - 1
        send(rank)
        assert look() is None, "a part has come"
    clock.now += PATIENCE_S - 1
    assert look() is None
    clock.now += 2
    assert "the parts of 1 of 4 ranks are missing, and none of them has come for 1800 s: 3" in look()
    mine = begun[parts[0][0].save_id]
    assert mine.permanent, "a drain without a trainer need not stay"
    for _ in range(20):
        assert 0 < mine.due - clock.now <= clock.timing.redo_max_s, "the looks go on"
        clock.now = mine.due
        assert look() is None, "it is said once"
        assert mine.permanent
    assert mine.failures == 1
    send(3)
    assert sorted(look()) == [0, 1, 2, 3]


def test_a_damaged_description_of_an_older_save_that_waits_holds_up_no_later_one(store):
    clock, begun = Hours(), Unfinished()
    (older, _), *_ = made = [make_part("a.ckpt", number, rank, world_size=2) for number in (1, 2) for rank in (0, 1)]
    for part, content in (made[0], *made[2:]):
        put_part(store, part, views_of(content))
    assert begun.gather(store, older, PATIENCE_S, clock) is None
    store.put(ids.description_key(older.save_id, 1), b"{")
    assert sorted(begun.gather(store, made[2][0], PATIENCE_S, clock)) == [0, 1]
    with pytest.raises(CorruptCheckpointError):
        begun.gather(store, older, PATIENCE_S, clock)


# ------------------------------------------------------- process groups that save side by side, such as stages
RUN = ids.run_id_of(op_id(1))


def stage(node, which, number, rank=0, world_size=1):
    """Returns a rank's part of a stage's save."""
    name, series = f"stage{which}/step_{number}", f"stage{which}/step_#"
    return node.part(name, number, rank, series=series, world_size=world_size)


@pytest.mark.parametrize("why", ["it has failed", "a part has not come"])
def test_a_save_is_not_given_up_where_another_group_has_got_through(nodes, store, why):
    """One process coordinates both groups here; groups on nodes of their own are simulated in tests/sim."""
    here, other = nodes
    missing = stage(here, 0, 1, 0, 2)
    stage(here, 1, 2, 0, 2)
    stage(other, 1, 2, 1, 2)
    if why == "it has failed":
        stage(other, 0, 1, 1, 2)
    assert drain(other).run(once=True)
    away = refusing(store, lambda what, key: key.startswith("stage0") and why == "it has failed", Injected("away"))
    assert drain(here, away).run(once=True)
    assert names(store) == ["stage1/step_2"]
    assert pending(here) == [missing]
    if why != "it has failed":
        stage(other, 0, 1, 1, 2)
        assert drain(other).run(once=True)
    assert drain(here).run(once=True)
    assert [readable(store, f"stage{which}/step_{which + 1}") for which in (0, 1)] == [1, 2]
    assert (left(store), pending(here)) == ([], [])


@pytest.mark.parametrize("series", ["", "stage0/step_#"])
def test_a_part_says_which_saves_its_own_is_one_of(series):
    """The ranks agreed on it: names do not show whether they are of one job."""
    facts = SaveFacts("stage0/step_1", ids.save_id(RUN, 1), 1, 2, True, series=series, coordinator=0)
    parts = [facts.describe(rank, Place("d"), (), created=1.0) for rank in (0, 1)]
    read = [Part.from_json(each.to_json(), where="here") for each in parts]
    assert {each.series_key for each in (*parts, *read)} == {(Place("d"), series, 0)}


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
    # The descriptions and files of this one; leases and manifests, for retention.
    assert second.lists.total() == third.lists.total() == 4, (second, third)
    assert not other.lists, "only the coordinator's drain looks at what others have sent"
    assert [sum(node.looks for node in each) for each in zip(*found, strict=True)] == [3, 0], (
        "one drain, once it is open"
    )
