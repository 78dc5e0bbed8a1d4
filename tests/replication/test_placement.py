"""Placement of copies: whatever the nodes, never on the same one, and the same load for all."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_checkpoint_io.engine.replication.placement import node_peers, peers_of_ranks, sender_of
from tiered_checkpoint_io.errors import ConfigError


@st.composite
def clusters(draw):
    """Nodes of ranks in any order, and a factor that they allow."""
    count = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    nodes = draw(st.permutations([f"node{i}" for i, size in enumerate(sizes) for _ in range(size)]))
    return nodes, draw(st.integers(1, count))


@given(clusters())
def test_every_copy_is_on_another_node_so_it_takes_as_many_lost_nodes_to_lose_a_part(cluster):
    nodes, factor = cluster
    peers = peers_of_ranks(nodes, factor=factor)
    assert len(peers) == len(nodes)
    for rank, mine in enumerate(peers):
        assert len(mine) == factor - 1
        assert len({nodes[rank], *(nodes[peer] for peer in mine)}) == factor


@given(st.integers(1, 40), st.integers(1, 6))
def test_every_node_keeps_as_much_as_it_has_kept_for_it(count, factor):
    factor = min(factor, count)
    load = Counter(peer for peers in node_peers(count, factor=factor) for peer in peers)
    assert set(load.values()) <= {factor - 1}
    assert len(load) == (count if factor > 1 else 0)


@given(st.integers(1, 5), st.integers(1, 4))
def test_nodes_form_cliques_where_their_number_allows(blocks, factor):
    peers = node_peers(blocks * factor, factor=factor)
    for node, mine in enumerate(peers):
        clique = {node, *mine}
        assert all({other, *peers[other]} == clique for other in clique)
        ordered = sorted(clique)
        assert all(b - a == 1 for a, b in itertools.pairwise(ordered))


def test_three_nodes_with_two_copies_go_around():
    assert peers_of_ranks(list("aabbcc"), factor=2) == [(2,), (3,), (4,), (5,), (0,), (1,)]


@pytest.mark.parametrize(("nodes", "factor"), [("a", 2), ("aaaa", 2), ("aabb", 3)])
def test_copies_on_one_machine_are_refused(nodes, factor):
    with pytest.raises(ConfigError, match="same machine"):
        peers_of_ranks(list(nodes), factor=factor)


@given(nodes=st.lists(st.sampled_from("abc"), min_size=1, max_size=8), part=st.integers(0, 9))
def test_a_part_is_sent_by_one_rank_of_each_node_that_holds_it_its_own_if_it_is_there(nodes, part):
    for node in set(nodes):
        sender = sender_of(part, node, nodes)
        assert nodes[sender] == node
        assert sender == part or nodes[part:][:1] != [node]
