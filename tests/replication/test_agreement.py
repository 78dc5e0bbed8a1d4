"""Agreement on replicas: placement, what counts as replicated, and when a save is given up for a newer one."""

import itertools
from collections import Counter

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.sharded import make_part

from tiered_checkpoint_io.engine.ranks.run import StoreClient
from tiered_checkpoint_io.engine.replication.agreement import (
    Agreement,
    Group,
    Held,
    Node,
    Orders,
    Report,
    check_machines,
    node_peers,
)
from tiered_checkpoint_io.engine.replication.replicas import form_key
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory.tier import MemoryTier

PATIENCE_S = 60.0


def group_of(machines, factor):
    nodes = tuple(Node(name, str(number), "address", 1, "t") for number, name in enumerate(machines))
    return Group("ab", factor, None, nodes)


class Cluster:
    """Memories of nodes that carry out their orders; the first one leads."""

    def __init__(self, machines, factor, parts):
        self.group, self.parts = group_of(machines, factor), parts
        self.leader = Agreement(self.group, "leader", patience_s=PATIENCE_S)
        self.held = [{} for _ in machines]
        self.done, self.failed = [Orders() for _ in machines], [{} for _ in machines]
        self.now = 0.0

    def save(self, number, *, lacks=()):
        """Gives each rank's node its part, rank after rank, of the nodes in order."""
        for rank in range(self.parts):
            if rank not in lacks:
                self.held[rank % len(self.held)][f"save{number}", rank] = "own"

    def round(self, silent=(), passes=0.1, pulls=True):
        """One round: reports, decisions, and orders that are carried out; the silent nodes take no part."""
        taking_part = [node for node in range(len(self.held)) if node not in silent]
        self.leader.take({node: self.report(node) for node in taking_part}, self.now)
        for node in taking_part:
            orders = Orders.from_json(self.leader.orders(node).to_json())
            for pull in orders.pulls if pulls else ():
                assert all((pull.save_id, pull.rank) in self.held[source] for source in pull.sources)
                self.held[node].setdefault((pull.save_id, pull.rank), "replica")
            self.done[node] = orders
        self.now += passes

    def report(self, node):
        orders, held = self.done[node], []
        for (save_id, rank), what in self.held[node].items():
            is_safe = save_id in orders.replicated
            is_kept = what == "replica" or is_safe or save_id in orders.awaited
            held.append(Held(save_id, rank, self.parts, "form", is_kept, is_safe))
        return Report.from_json(Report(orders.name, tuple(held), self.failed[node]).to_json())

    def machines_with(self, save_id, rank):
        return {self.group.nodes[node].machine for node, held in enumerate(self.held) if (save_id, rank) in held}

    def is_safe(self, number):
        """Returns True if enough machines hold each part of a save."""
        return all(len(self.machines_with(f"save{number}", rank)) >= self.group.factor for rank in range(self.parts))

    def replicated(self):
        return {save_id for orders in self.done for save_id in orders.replicated}


@st.composite
def clusters(draw):
    """Nodes of machines in any order, a factor that they allow, and a number of parts."""
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    machines = draw(st.permutations([f"m{i}" for i, size in enumerate(sizes) for _ in range(size)]))
    return Cluster(machines, draw(st.integers(1, count)), draw(st.integers(1, 9)))


@given(clusters(), st.randoms(use_true_random=False))
def test_each_part_gets_to_as_many_machines_as_it_is_to_and_only_then_counts(cluster, random):
    cluster.save(1)
    for _ in range(20):
        cluster.round(silent=[node for node in range(len(cluster.held)) if random.random() < 0.2])
        assert not cluster.replicated() or cluster.is_safe(1)
    for _ in range(4):
        cluster.round()
    assert cluster.is_safe(1)
    assert cluster.replicated() == {"save1"}
    assert all(orders.is_settled for orders in cluster.done)
    # No machine holds a part twice, except as several of its nodes have saved it.
    for rank in range(cluster.parts):
        assert len(cluster.machines_with("save1", rank)) == max(1, cluster.group.factor)


def test_parts_of_ranks_on_one_machine_go_to_the_nodes_of_another():
    cluster = Cluster("aabb", 2, 4)
    cluster.save(1)
    cluster.round()
    assert [sorted(rank for _, rank in held) for held in cluster.held] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_node_that_may_not_know_of_the_orders_or_has_begun_to_remove_its_part_does_not_count():
    cluster = Cluster("ab", 2, 1)
    cluster.held[0]["save1", 0] = cluster.held[1]["save1", 0] = "own"
    cluster.round()
    cluster.round(silent=[1])
    assert not cluster.replicated()
    held = Held("save1", 0, 1, "form", is_kept=False, replicated=False)
    reports = {0: cluster.report(0), 1: Report(cluster.done[0].name, (held,))}
    cluster.leader.take(reports, cluster.now)
    assert not cluster.leader.orders(0).replicated
    cluster.round()
    cluster.round()
    assert cluster.replicated() == {"save1"}


def test_a_save_that_does_not_get_to_a_silent_node_is_given_up_and_the_newest_is_next():
    cluster = Cluster("ab", 2, 1)
    cluster.save(1)
    cluster.round(pulls=False)
    cluster.round(silent=[1], passes=PATIENCE_S - 1)
    for number in (2, 3):
        cluster.save(number)
        cluster.round(silent=[1])
    assert cluster.done[0].awaited == ("save1",)
    cluster.round(silent=[1], passes=1.0)
    cluster.round(silent=[1])
    assert cluster.done[0].awaited == ("save3",)
    assert "b did not answer" in cluster.done[0].given_up["save1"]
    for _ in range(4):
        cluster.round()
    assert cluster.replicated() == {"save3"}


def test_a_save_without_a_newer_one_stays_though_a_node_has_no_room():
    cluster = Cluster("ab", 2, 1)
    cluster.save(1)
    cluster.failed[1] = {"save1": "no room"}
    for _ in range(3):
        cluster.round(pulls=False)
    assert cluster.done[0].given_up == {"save1": "no room"}
    cluster.failed[1] = {}
    for _ in range(3):
        cluster.round()
    assert cluster.replicated() == {"save1"}


def test_a_save_of_which_a_rank_has_no_part_waits_for_it_and_a_whole_one_that_lost_a_part_is_given_up():
    cluster = Cluster("ab", 2, 2)
    cluster.save(1, lacks=[1])
    cluster.round()
    assert cluster.done[0].awaited == ()
    cluster.save(1)
    cluster.round(pulls=False)
    assert cluster.done[0].awaited == ("save1",)
    cluster.held[1].clear()
    cluster.round(pulls=False)
    assert cluster.done[0].awaited == ()
    assert "gone" in cluster.done[0].given_up["save1"]


def test_a_part_that_became_awaited_since_it_was_looked_at_is_not_removed(memory_dir):
    tier = MemoryTier.open(memory_dir, "test")
    part, files = make_part("step_1", 1, 0)
    stored = tier.commit(part, files)
    tier.mark_awaited(stored, is_awaited=True)
    tier.remove(stored)
    (kept,) = tier.parts()
    tier.mark_awaited(kept, is_awaited=False)
    tier.remove(tier.find(kept.save_id))
    assert tier.parts() == []
    tier.close()


def test_a_metric_in_a_name_keeps_no_save_for_ever():
    """Each would be the only one of its form: a job's memory would fill up."""
    names = [f"best-step={number}-val_loss=0.3{number}" for number in (1, 2)]
    assert len({form_key(make_part(name, 1, 0, kind="local")[0]) for name in names}) == 1


# --------------------------------------------------------------------------------------- placement
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


@pytest.mark.parametrize(("machines", "factor"), [("a", 2), ("aaaa", 2), ("aabb", 3)])
def test_copies_on_one_machine_are_refused(machines, factor):
    with pytest.raises(ConfigError, match="same machine"):
        check_machines(group_of(machines, factor).nodes, factor)


# ------------------------------------------------------------------- the store of torch.distributed
def test_a_store_that_is_gone_is_an_error_and_asked_again_the_next_time():
    store = StoreClient(dist.HashStore(), "test", timeout_s=10.0)

    def fails(_):
        raise RuntimeError("Connection reset by peer\nframe #0: c10d::TCPStore")

    with pytest.raises(ConfigError, match=r"can't be asked: Connection reset by peer .operation=agree."):
        store.ask(fails)
    assert store.swap("key", "", "value") == "value"
    assert (store.get("key"), store.get("other")) == ("value", None)
    store.close()
