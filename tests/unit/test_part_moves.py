"""Where the copies of parts go whose nodes are lost: to their ranks' nodes, each once, and only those."""

import contextlib
import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.restoring import in_ranks, make_content

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.replication.placement import peers_of_ranks
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.engine.restore.part_moves import PartMove, move_parts, moves_to_owners, restore_owners
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Part


def moved(memory, world_size, nodes):
    """The moves of a save of so many ranks, whose parts lie so."""
    content = replace(make_content("x", b"x", 1, kind="sharded"), world_size=world_size, parts=world_size)
    return moves_to_owners(Candidate("step_1", content, held=memory), nodes)


def memory_of(nodes, factor, lost):
    """What is left in memory of a job with these ranks' nodes."""
    memory = {node: {} for node in nodes}
    for rank, peers in enumerate(peers_of_ranks(nodes, factor=factor)):
        memory[nodes[rank]][rank] = True
        for peer in peers:
            memory[nodes[peer]].setdefault(rank, False)
    return {node: held for node, held in memory.items() if node not in lost and held}


@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_lost_nodes_get_their_parts_back_as_long_as_copies_are_left(count, each, data):
    nodes = [f"n{i}" for i in range(count) for _ in range(each)]
    factor = data.draw(st.integers(2, count))
    lost = data.draw(st.sets(st.sampled_from(sorted(set(nodes))), max_size=factor - 1))
    planned = moved(memory_of(nodes, factor, lost), len(nodes), nodes)
    assert [move.part for move in planned] == [rank for rank, node in enumerate(nodes) if node in lost]
    for move in planned:
        assert move.target == move.part
        having = {nodes[move.part], *(nodes[peer] for peer in peers_of_ranks(nodes, factor=factor)[move.part])}
        assert {nodes[source] for source in move.sources} == having - lost
        assert set(move.sources) == {rank for rank, node in enumerate(nodes) if node in having - lost}, "all can send"


def test_nothing_moves_while_every_part_has_an_owner():
    nodes = list("aabb")
    assert moved(memory_of(nodes, 2, set()), 4, nodes) == []


def test_with_another_number_of_ranks_who_has_a_copy_becomes_its_owner():
    memory = memory_of(list("aabbcc"), 2, {"b"})
    assert moved(memory, 6, list("aac")) == [PartMove(2, 2, (2,)), PartMove(3, 2, (2,))]


def test_what_nobody_has_does_not_move():
    memory = memory_of(list("abc"), 2, {"a", "b"})
    assert [move.part for move in moved(memory, 3, list("abc"))] == [1]


@pytest.mark.parametrize("holders", ["b", "ab"], ids=["it comes from another node", "a replica is there"])
def test_a_lost_part_gets_its_owner_back_however_many_hashes_it_has(memory_dir, holders):
    """What each rank tells all others stays small, see ``in_ranks``."""
    data, nodes, tiers = os.urandom(200 << 10), list("abb"), {}
    content = make_content("x/__0_0.distcp", data, 1, chunk=1 << 10, kind="sharded")
    content = replace(content, world_size=3, parts=3)
    for node in "ab":
        os.mkdir(f"{memory_dir}/{node}")
        memory = MemoryTier.open(f"{memory_dir}/{node}", "default")
        config = TieredCheckpointConfig(dirpath="s3://bucket/run", memory_dir=f"{memory_dir}/{node}")
        tiers[node] = Tiers(config, memory, lambda: None, config.dirpath, logging.getLogger("test"))
        if node in holders:
            slot = memory.replicas.acquire(len(data))
            slot.view[: len(data)] = data
            memory.replicas.commit(Part("x", 0, content, config.dirpath, durable=True), {"__0_0.distcp": slot})
    candidate = Candidate("x", content, held={node: {0: False} for node in holders})
    assert in_ranks(nodes, lambda group: restore_owners(group, tiers[group.node], candidate, nodes)) == [None] * 3
    (stored,) = tiers["a"].memory.parts()
    assert not stored.is_replica
    assert stored.file("__0_0.distcp").read_bytes() == data


def test_a_part_that_no_rank_sends_says_so():
    class Nowhere:
        def open(self):
            return contextlib.nullcontext({})

        def drop(self):
            pass

    part = Part("x", 0, make_content("x", b"x", 1), "s3://bucket/run", durable=True)
    tiers = SimpleNamespace(memory=None, clock=SYSTEM)
    result = move_parts(Group("n"), tiers, [PartMove(0, 0, ())], {0: part}, lambda _: Nowhere())
    with pytest.raises(CorruptCheckpointError, match="no rank has sent all of it intact"):
        result()
