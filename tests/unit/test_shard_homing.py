"""Where the copies of parts go whose nodes are lost: to their ranks' nodes, each once, and only those."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.restoring import make_content, save_id

from tiered_checkpoint_io.engine.replication.placement import peers_of_ranks
from tiered_checkpoint_io.engine.restore.shard_choice import HeldPart
from tiered_checkpoint_io.engine.restore.shard_homing import Move, moves

SAVE = save_id(1)


def part(rank, *, owns):
    return HeldPart("step_1", rank, rank == 0, replace(make_content("x", b"x", 1, kind="sharded"), world_size=9), owns)


def memory_of(nodes, factor, lost):
    """What is left in memory of a job with these ranks' nodes."""
    memory = {node: [] for node in nodes}
    for rank, peers in enumerate(peers_of_ranks(nodes, factor=factor, jump=1)):
        memory[nodes[rank]].append(part(rank, owns=True))
        for peer in peers:
            memory[nodes[peer]].append(part(rank, owns=False))
    return {node: [] if node in lost else held for node, held in memory.items()}


@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_lost_nodes_get_their_parts_back_as_long_as_copies_are_left(count, each, data):
    nodes = [f"n{i}" for i in range(count) for _ in range(each)]
    factor = data.draw(st.integers(2, count))
    lost = data.draw(st.sets(st.sampled_from(sorted(set(nodes))), max_size=factor - 1))
    planned = moves(SAVE, len(nodes), memory_of(nodes, factor, lost), nodes)
    assert [move.part for move in planned] == [rank for rank, node in enumerate(nodes) if node in lost]
    for move in planned:
        assert move.target == move.part
        assert nodes[move.source] not in lost
    loads = [[move.source for move in planned].count(rank) for rank in range(len(nodes))]
    if len(lost) == 1 and factor == count:
        assert max(loads) <= 1, "many send, each a little"


def test_nothing_moves_while_every_part_has_an_owner():
    nodes = list("aabb")
    assert moves(SAVE, 4, memory_of(nodes, 2, set()), nodes) == []


def test_with_another_number_of_ranks_who_has_a_copy_becomes_its_owner():
    memory = memory_of(list("aabbcc"), 2, {"b"})
    del memory["b"]
    assert moves(SAVE, 6, memory, list("aac")) == [Move(2, 2, 2), Move(3, 2, 2)]


def test_what_nobody_has_does_not_move():
    memory = memory_of(list("abc"), 2, {"a", "b"})
    assert [move.part for move in moves(SAVE, 3, memory, list("abc"))] == [1]
