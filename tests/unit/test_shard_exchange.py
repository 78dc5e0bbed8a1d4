"""What travels between nodes when ranks load a sharded checkpoint: a pure decision."""

from tiered_checkpoint_io.engine.restore.shard_exchange import ShardNeed, Transfer, transfers
from tiered_checkpoint_io.model.manifest import FileEntry


def entry(name, chunks):
    return FileEntry(f"step_1/{name}", 10 * chunks, 10, ("",) * chunks)


def test_each_chunk_travels_once_to_each_node_that_needs_it():
    needs = [
        ShardNeed("a", {}, {"x": entry("x", 3)}),
        ShardNeed("b", {"x": [(5, 10)]}, {"y": entry("y", 1)}),
        ShardNeed("b", {"x": [(0, 1), (12, 3)]}),
        ShardNeed("c", {"x": [(29, 1)], "y": [(0, 4)]}),
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
    needs = [
        ShardNeed("a", holds={"x": x, "y": y}),
        ShardNeed("b", holds={"x": x}),
        ShardNeed("c", {"x": [(0, 1)], "y": [(0, 1)]}),
    ]
    assert [(each.basename, each.source) for each in transfers(needs)[1]] == [("x", 0), ("y", 0)]
    assert [(each.basename, each.source) for each in transfers(needs, {("x", 0)})[1]] == [("x", 1), ("y", 0)]
    assert [(each.basename, each.source) for each in transfers(needs, {("x", 0), ("x", 1)})[1]] == [("y", 0)]


def test_no_rank_sends_to_its_own_node_what_another_one_there_has_found_damaged():
    x = entry("x", 3)
    needs = [ShardNeed("a", holds={"x": x}), ShardNeed("a", {"x": [(5, 10)]}), ShardNeed("b", {"x": [(0, 1)]})]
    assert transfers(needs) == ({}, [])
    assert transfers([*needs, ShardNeed("c", holds={"x": x})])[1] == [
        Transfer("x", 0, 3, 0),
        Transfer("x", 0, 3, 2),
        Transfer("x", 1, 3, 0),
    ]


def test_a_file_that_nobody_holds_is_left_to_whoever_needs_it():
    assert transfers([ShardNeed("a", {"x": [(0, 1)]}), ShardNeed("b")]) == ({}, [])
