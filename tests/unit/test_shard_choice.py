"""The pure decisions about sharded checkpoints: what memory keeps, what travels between nodes."""

from pathlib import Path

from tiered_checkpoint_io.engine.restore.shard_exchange import Need, Transfer, transfers
from tiered_checkpoint_io.engine.saving.shard_retention import surplus
from tiered_checkpoint_io.engine.saving.tickets import Ticket
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.ids import series_of
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part

RUN = ids.new_run_id(now=1_700_000_000.0)


def save_id(number):
    return ids.save_id(RUN, number)


def content(number, *, world_size=2, kind="sharded", step=None):
    return Content(save_id(number), number if step is None else step, -1, kind, 1.0, world_size, {}, ())


# ---------------------------------------------------------------------------------------- retention
def stored(number, *, pending=False, name=None):
    held = Part(name or f"step_{number}", 1, content(number), "/d", durable=pending)
    return StoredPart(held, Path("/nowhere"), drained=False)


def kept(held, completed, keep_last):
    done = tuple(save_id(n) for n in completed)
    ticket = Ticket("step_99", save_id(99), 99, 2, durable=False, completed=done, series=series_of("step_99"))
    gone = surplus(held, ticket, keep_last)
    return [each.part.content.step for each in held if each not in gone]


def test_with_the_new_one_memory_holds_as_many_as_it_is_told():
    assert kept([stored(n) for n in (1, 2, 3)], [1, 2, 3], 2) == [3]
    assert kept([stored(n) for n in (1, 2, 3)], [1, 2, 3], 3) == [2, 3]
    assert kept([stored(n) for n in (1, 2, 3)], [1, 2, 3], 1) == [3], "the new one may fail"


def test_before_this_run_has_a_complete_save_nothing_is_removed():
    assert kept([stored(n) for n in (1, 2, 3)], [], 1) == [1, 2, 3]


def test_saves_of_earlier_runs_fill_up_what_this_run_does_not_have():
    assert kept([stored(n) for n in (1, 2, 3)], [3], 3) == [2, 3]


def test_failed_saves_go_and_those_being_finished_stay():
    assert kept([stored(n) for n in (1, 2, 3, 4)], [1, 3], 3) == [1, 3, 4]


def test_what_waits_for_the_durable_tier_and_other_series_stay():
    held = [stored(1, pending=True), stored(2, name="tp1/step_2"), stored(3), stored(4)]
    assert kept(held, [3, 4], 1) == [1, 2, 4]


def test_names_that_differ_by_step_and_epoch_are_one_series():
    assert ids.series_of("tp0/step_5") == ids.series_of("tp0/step_12") != ids.series_of("tp1/step_5")
    assert ids.series_of("epoch=0-step=12.ckpt") == ids.series_of("epoch=3-step=99.ckpt")
    assert ids.series_of("tp0_ep0") != ids.series_of("tp1_ep0")


# ----------------------------------------------------------------------------------------- exchange
def entry(name, chunks):
    return FileEntry(f"step_1/{name}", 10 * chunks, 10, ("",) * chunks)


def test_each_chunk_travels_once_to_each_node_that_needs_it():
    needs = [
        Need("a", {}, {"x": entry("x", 3)}),
        Need("b", {"x": [(5, 10)]}, {"y": entry("y", 1)}),
        Need("b", {"x": [(0, 1), (12, 3)]}),
        Need("c", {"x": [(29, 1)], "y": [(0, 4)]}),
    ]
    entries, planned = transfers(needs)
    assert sorted(entries) == ["x", "y"]
    assert planned == [
        Transfer("x", 0, 0, 1),
        Transfer("x", 1, 0, 1),
        Transfer("x", 2, 0, 3),
        Transfer("y", 0, 1, 3),
    ]


def test_a_source_that_failed_is_left_out_for_that_file_alone():
    x, y = entry("x", 10), entry("y", 10)
    needs = [Need("a", holds={"x": x, "y": y}), Need("b", holds={"x": x}), Need("c", {"x": [(0, 1)], "y": [(0, 1)]})]
    assert [(each.basename, each.source) for each in transfers(needs)[1]] == [("x", 0), ("y", 0)]
    assert [(each.basename, each.source) for each in transfers(needs, {("x", 0)})[1]] == [("x", 1), ("y", 0)]
    assert [(each.basename, each.source) for each in transfers(needs, {("x", 0), ("x", 1)})[1]] == [("y", 0)]


def test_a_file_that_nobody_holds_is_left_to_whoever_needs_it():
    assert transfers([Need("a", {"x": [(0, 1)]}), Need("b")]) == ({}, [])
