"""The pure decisions about sharded checkpoints: which to load, what memory keeps, what travels between nodes."""

from pathlib import Path

from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.engine.restore.shard_choice import HeldPart, shard_candidates
from tiered_checkpoint_io.engine.restore.shard_exchange import Need, Transfer, transfers
from tiered_checkpoint_io.engine.saving.shard_retention import surplus
from tiered_checkpoint_io.engine.saving.tickets import Ticket
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.ids import series_of
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Manifest, Part

RUN = ids.new_run_id(now=1_700_000_000.0)
LATEST = Selector("latest")


def save_id(number):
    return ids.save_id(RUN, number)


def content(number, *, world_size=2, kind="sharded", step=None):
    return Content(save_id(number), number if step is None else step, -1, kind, 1.0, world_size, {}, ())


def part(number, rank, *, commits=None, **more):
    return HeldPart(f"step_{number}", rank, rank == 0 if commits is None else commits, content(number, **more))


def manifest(number, **more):
    return Manifest(f"step_{number}", content(number, **more))


def names(candidates):
    return [candidate.name for candidate in candidates]


def test_the_newest_save_of_any_tier_comes_first():
    memory = {"a": [part(1, 0), part(1, 1), part(3, 0), part(3, 1)]}
    found = shard_candidates(memory, [manifest(2), manifest(1)], LATEST)
    assert names(found) == ["step_3", "step_2", "step_1"]
    assert [each.durable is not None for each in found] == [False, True, True]
    assert [each.metadata_nodes for each in found] == [("a",), (), ("a",)]


def test_parts_on_several_nodes_make_one_checkpoint():
    memory = {"a": [part(1, 0)], "b": [part(1, 1)]}
    assert names(shard_candidates(memory, [], LATEST)) == ["step_1"]


def test_a_save_that_lacks_a_part_or_its_metadata_is_no_candidate():
    memory = {"a": [part(1, 0), part(1, 1), part(2, 0), part(3, 0, commits=False), part(3, 1)], "b": []}
    assert names(shard_candidates(memory, [], LATEST)) == ["step_1"]


def test_what_memory_lacks_is_taken_from_the_durable_tier():
    found = shard_candidates({"a": [part(2, 0)]}, [manifest(2)], LATEST)
    assert names(found) == ["step_2"]
    assert found[0].metadata_nodes == ()


def test_full_checkpoints_and_rejected_ones_are_left_out():
    memory = {"a": [part(1, 0), part(1, 1)]}
    durable = [manifest(2), manifest(3, kind="full")]
    assert names(shard_candidates(memory, durable, LATEST, {save_id(2)})) == ["step_1"]


def test_a_step_or_a_name_selects():
    memory = {"a": [part(number, rank) for number in (1, 2, 3) for rank in (0, 1)]}
    assert names(shard_candidates(memory, [manifest(2)], Selector("latest", step=2))) == ["step_2"]
    assert names(shard_candidates(memory, [], Selector("name", "step_1"))) == ["step_1"]
    assert shard_candidates(memory, [], Selector("latest", step=9)) == []


def test_an_overwrite_under_way_offers_both_contents():
    both = Manifest("step_1", content(5, step=1), previous=(content(1),))
    found = shard_candidates({"a": []}, [both], LATEST)
    assert [each.save_id for each in found] == [save_id(5), save_id(1)]


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
