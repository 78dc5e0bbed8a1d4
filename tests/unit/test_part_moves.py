"""Where the copies of parts go whose nodes are lost: to their ranks' nodes, each once, and only those."""

import logging
import os
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.restoring import SMALL, in_ranks, make_content
from support.sharded import make_part

from tiered_checkpoint_io.engine.replication.placement import peers_of_ranks
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.engine.restore.part_moves import PartMove, moves_to_owners, restore_owners
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def moved(memory, world_size, nodes):
    """The moves of a save of so many ranks, whose parts lie so."""
    content = replace(make_content("x", b"x", 1, kind="sharded"), world_size=world_size, parts=world_size)
    return moves_to_owners(Candidate("step_1", content, held=memory), nodes)


def memory_of(nodes, factor, lost):
    """What is left in memory of a job with these ranks' nodes."""
    memory = {node: {} for node in nodes}
    for rank, peers in enumerate(peers_of_ranks(nodes, factor=factor, jump=1)):
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
        having = {nodes[move.part], *(nodes[peer] for peer in peers_of_ranks(nodes, factor=factor, jump=1)[move.part])}
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


def test_of_a_replica_that_becomes_its_node_s_own_no_rank_tells_the_hashes(memory_dir, tmp_path):
    """They grow with the part, and each rank would get those of all."""
    tiers = {}
    for rank, node in enumerate("ab"):
        os.mkdir(f"{memory_dir}/{node}")
        tiers[node] = MemoryTier.open(f"{memory_dir}/{node}", "default")
        part, files = make_part("step_1", 1, rank, dirpath=str(tmp_path), size=100_000)
        assert len(part.to_json()) > 2 * SMALL
        slots = {}
        for basename, data in files.items():
            slots[basename] = tiers[node].replicas.acquire(len(data))
            slots[basename].view[: len(data)] = data
        tiers[node].replicas.commit(part, slots)
    candidate = Candidate("step_1", part.content, held={"a": {0: False}, "b": {1: False}})

    def work(group):
        config = TieredCheckpointConfig(dirpath=str(tmp_path), memory_dir=f"{memory_dir}/{group.node}")
        here = Tiers(config, tiers[group.node], lambda: None, str(tmp_path), logging.getLogger("test"))
        restore_owners(group, here, candidate, ["a", "b"])
        return [(stored.part.rank, stored.is_replica) for stored in tiers[group.node].held()]

    assert in_ranks("ab", work) == [[(0, False)], [(1, False)]]
