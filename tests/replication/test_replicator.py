"""Replication: placement, one decision for all ranks, and few requests to the store of torch.distributed."""

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import VirtualClock
from support.sharded import make_part

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.ranks.run import PeerError, StoreClient
from tiered_checkpoint_io.engine.replication.meeting import node_peers, peers_of_ranks, sender_of
from tiered_checkpoint_io.engine.replication.replicator import _MAX_DECIDED, Fates, Keeper, Offers, form_key
from tiered_checkpoint_io.engine.retention import Rules
from tiered_checkpoint_io.engine.staging import Capturer
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.peer import Endpoint

KEY = "offer/0"
LOG = logging.getLogger("test.peers")
#: An endpoint without a server.
NOWHERE = Endpoint("127.0.0.1", 1, "ab")


class Counted:
    """A store whose requests are counted."""

    def __init__(self, store, counts):
        self._store, self._counts = store, counts

    def __getattr__(self, name):
        self._counts[name] += 1
        return getattr(self._store, name)


class CountedStore(StoreClient):
    def __init__(self, origin):
        super().__init__(origin, "test", timeout_s=10.0)
        self.counts = Counter()

    def _connect(self):
        return Counted(super()._connect(), self.counts)


@pytest.fixture
def store():
    client = CountedStore(dist.HashStore())
    yield client
    client.close()
    for thread in [each for each in threading.enumerate() if each.name == "tiered-store"]:
        # Of a connection that was given up: it ends by itself.
        thread.join(10)
        assert not thread.is_alive()


def test_a_key_that_goes_while_it_is_read_costs_neither_time_nor_the_connection():
    """A source withdraws such an offer while its peer looks for it."""
    origin = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client, other = (StoreClient(origin, "test", timeout_s=2.0) for _ in range(2))
    client.set("seen", "yes")
    thread = client._thread

    def come_and_go():
        for _ in range(1000):
            other.set(KEY, "a part")
            other.forget(KEY)

    beside = threading.Thread(target=come_and_go)
    beside.start()
    found = set()
    while beside.is_alive():
        found.add(client.get(KEY))
    beside.join()
    assert found <= {None, "a part"}
    assert (client.get("seen"), client._thread) == ("yes", thread)
    client.close()
    other.close()


def test_a_store_that_is_gone_is_an_error_and_asked_anew_the_next_time(store):
    def fails(_):
        raise RuntimeError("Connection reset by peer\nframe #0: c10d::TCPStore")

    with pytest.raises(PeerError, match=r"can't be asked: Connection reset by peer .operation=agree."):
        store.ask(fails)
    store.set("key", "value")
    assert (store.get("key"), store.get("other"), store.add("n", 2), store.add("n", 0)) == ("value", None, 2, 2)


# ------------------------------------------------------------------------------------------ copies
NOTHING = SimpleNamespace(parts=list, replicas=SimpleNamespace(parts=list))
FATES = SimpleNamespace(
    begin=lambda _: True,
    count=lambda _: None,
    drop=lambda _: None,
    look=lambda: None,
    is_decided=lambda _: True,
    is_open=lambda _: False,
)
PART = SimpleNamespace(save_id="save", rank=0, name="step_1", content=SimpleNamespace(step=1, size=1))


def member(store, rank, clock):
    config = SimpleNamespace(memory_keep_last=2)
    facts = {"tier": NOTHING, "store": store, "clock": clock, "log": LOG, "config": config, "timeout_s": 60.0}
    return SimpleNamespace(rank=rank, serve=lambda: NOWHERE, **facts)


def offered(store, answers):
    """Returns the counts of one part's offer, and its time; each of two targets gives its answers at their times."""
    clock, counts, left = VirtualClock(), Counter(), list(answers)

    def sleep(seconds):
        clock.__dict__["now"] += seconds
        while left and left[0][0] <= clock.now:
            _, target, *answer = left.pop(0)
            store.set(f"answer/0/{target}", json.dumps([json.loads(store.get(KEY))[0], *answer]))

    object.__setattr__(clock, "sleep", sleep)
    offers = Offers(member(store, 0, clock), (1, 2), counts, FATES)
    offers.add(SimpleNamespace(part=PART, save_id="save"))
    while offers.pending:
        time.sleep(0.001)
    offers.close(1.0)
    return dict(counts), clock.now


def test_a_part_is_replicated_once_all_peers_answer_that_they_keep_it(store):
    assert offered(store, [(1, 1, "kept", ""), (2, 2, "reading", 0), (20, 2, "kept", "")])[0] == {"replicated": 1}


@pytest.mark.parametrize(
    ("answers", "bound_s"),
    [
        ([(1, 1, "kept", ""), (2, 2, "failed", "no room")], 10),
        # Not a word; or none any more once it had begun.
        ([(1, 1, "kept", "")], 70),
        ([(1, 1, "kept", ""), (2, 2, "reading", 0)], 40),
        # Waits while there is progress, up to the bound of one part.
        ([(1, 1, "kept", ""), *((at, 2, "reading", at) for at in range(2, 60, 10))], 70),
    ],
    ids=["refused", "silent", "stalled", "slow"],
)
def test_a_peer_that_does_not_keep_it_costs_a_count_within_bounds(store, answers, bound_s):
    counts, took = offered(store, answers)
    assert counts == {"unreplicated": 1}
    assert took < bound_s


def test_a_rank_that_keeps_replicas_rarely_asks_between_saves_and_often_once_it_saves_itself(store):
    """All ranks do, for the whole run, of one store in the process of rank 0."""
    clock = VirtualClock(peer_back_s=0.0)
    keeping = Keeper(member(store, 1, clock), [0], FATES)
    clock.advance(0.0, keeping._thread)
    before = sum(store.counts.values())
    clock.advance(600.0, keeping._thread)
    assert sum(store.counts.values()) - before < 400
    for number, (wakes, within_s) in enumerate([(False, 2.0), (True, 0.0)], start=1):
        store.set(KEY, json.dumps([number, "save", 0, *NOWHERE]))
        if wakes:
            keeping.wake()
            while keeping._bell.is_set():
                clock.advance(0.0, keeping._thread)
        clock.advance(within_s, keeping._thread)
        answer = json.loads(store.get("answer/0/1"))
        assert (answer[:2], "refused" in answer[2]) == ([number, "failed"], True)
        clock.advance(600.0, keeping._thread)
    store.set("ended/0")
    keeping.close()


# --------------------------------------------------------------------------- decisions, and where copies are
RUN = ids.new_run_id(now=1_700_000_000)


class Rank:
    def __init__(self, rank, folder, origin, replicated=()):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.rank, self.tier = rank, MemoryTier.open(folder, "test")
        self.store = StoreClient(origin, "test", timeout_s=10.0)
        self.fates = Fates(self.store, self.tier, dict(replicated))

    def save(self, number, name="step_{}"):
        part, files = make_part(
            name.format(number), number, self.rank, world_size=2, kind="local", run=RUN, size=1_500_000
        )
        slots = {name: self.tier.acquire(len(data)) for name, data in files.items()}
        for name, data in files.items():
            slots[name].view[: len(data)] = data
        return self.tier.commit(part, slots)

    def marked(self):
        return [stored.part.content.step for stored in self.tier.parts() if stored.replicated]


@pytest.fixture
def origin():
    return dist.HashStore()


@pytest.fixture
def ranks(memory_dir, origin):
    both = [Rank(rank, f"{memory_dir}/{rank}", origin) for rank in (0, 1)]
    yield both
    for each in both:
        each.store.close()
        each.tier.close()
    for thread in [each for each in threading.enumerate() if each.name == "tiered-store"]:
        thread.join(10)


def test_a_metric_in_its_name_keeps_no_save_for_ever(ranks):
    """Each would be the only one of its name: a job's memory would fill up."""
    for number in (1, 2, 3):
        parts = [each.save(number, "best-step={0}-val_loss=0.3{0}").part for each in ranks]
        for each, part in zip(ranks, parts, strict=True):
            each.fates.begin(part)
            each.fates.count(part)
        for each in ranks:
            each.fates.look()
            assert each.fates.awaited() == {parts[0].save_id}


def test_what_one_rank_gives_up_is_replicated_for_none(ranks):
    one, other = ranks
    parts = [each.save(1).part for each in ranks]
    one.fates.begin(parts[0])
    one.fates.count(parts[0])
    assert not one.fates.is_decided(parts[0])
    # A newer save outdates it, and only then the other one comes round to it.
    one.fates.begin(one.save(2).part)
    assert not other.fates.begin(parts[1])
    other.fates.count(parts[1])
    for each in ranks:
        each.fates.look()
        assert each.marked() == []
        assert parts[0].save_id not in each.fates.awaited()


def test_what_is_complete_can_not_be_given_up_any_more(ranks):
    parts = [each.save(1).part for each in ranks]
    for each, part in zip(ranks, parts, strict=True):
        each.fates.begin(part)
        each.fates.count(part)
    ranks[0].fates.begin(ranks[0].save(2).part)
    ranks[1].fates.look()
    assert ranks[0].marked() == ranks[1].marked() == [1]


def test_what_a_node_has_not_learnt_it_learns_when_all_meet_again(ranks, memory_dir):
    stored = ranks[0].save(1)
    again = Rank(0, f"{memory_dir}/0", dist.HashStore(), {form_key(stored.part): stored.save_id})
    assert again.marked() == [1]
    assert again.fates.awaited() == {stored.save_id}
    again.store.close()
    again.tier.close()


def test_an_older_part_that_is_sent_again_gives_up_no_newer_save(ranks):
    older, parts = ranks[0].save(1).part, [each.save(2).part for each in ranks]
    for each in ranks:
        # Its own, and the other's, of which it keeps a replica.
        assert all(each.fates.begin(part) for part in parts)
        # By another rank, if its own no longer has it.
        assert not each.fates.begin(older)
    for each, part in zip(ranks, parts, strict=True):
        each.fates.count(part)
    for each in ranks:
        each.fates.look()
        assert each.marked() == [2]


def decided(rank, number, *, gives_up=False):
    """Has a rank replicate its part of a save that takes no memory here."""
    part, _ = make_part(f"step_{number}", number, rank.rank, world_size=2, kind="local", run=RUN)
    rank.fates.begin(part)
    if not gives_up:
        rank.fates.count(part)


@pytest.mark.parametrize("gives_up", [False, True])
def test_the_store_does_not_grow_with_every_save(ranks, origin, gives_up):
    sizes = []
    for number in range(1, 61):
        for each in ranks:
            decided(each, number, gives_up=gives_up)
        for each in ranks:
            each.fates.look()
        sizes.append(origin.num_keys())
    assert sizes[-1] == sizes[29] <= 2 * (_MAX_DECIDED + 2)


def test_a_rank_that_is_late_learns_what_the_others_go_by(ranks):
    for each in ranks:
        part = each.save(1).part
        each.fates.begin(part)
        each.fates.count(part)
    for number in range(2, 60):
        decided(ranks[0], number)
    assert ranks[1].marked() == []
    ranks[1].fates.look()
    assert ranks[0].marked() == ranks[1].marked() == [1]


def test_a_store_that_removes_no_keys_ends_nothing(ranks, monkeypatch):
    def refuse(*_):
        raise NotImplementedError("deleteKey not implemented")

    monkeypatch.setattr(dist.PrefixStore, "delete_key", refuse)
    for number in range(1, 30):
        for each in ranks:
            decided(each, number)
        for each in ranks:
            each.fates.look()
    assert ids.save_id(RUN, 29) in ranks[0].fates.awaited() & ranks[1].fates.awaited()


def test_a_save_without_room_takes_that_of_what_waits_but_not_of_what_is_on_its_way(ranks):
    rank = ranks[0]
    member = SimpleNamespace(store=rank.store, rank=0, clock=SYSTEM, log=logging.getLogger("tiered"))
    begun, stuck, counts = threading.Event(), threading.Event(), Counter()
    rank.fates.begin = lambda _: begun.set() or not stuck.wait(10)
    offers = Offers(member, (), counts, rank.fates)
    rank.tier.awaited = offers.awaited
    stored = [rank.save(number) for number in (1, 2, 3)]
    for each in stored:
        rank.tier.mark_drained(each)
        offers.add(each)
        begun.wait(10)
    capturer = Capturer(rank.tier)
    rules = Rules(ids.save_id(RUN, 4), 0, "local", stored[0].part.place)
    rank.tier._left = lambda: 0
    try:
        # Other processes have taken the freed space.
        with contextlib.suppress(MemoryFullError):
            capturer.acquire(500_000, rules)
    finally:
        stuck.set()
        offers.close(5.0)
    assert [each.part.content.step for each in rank.tier.parts()] == [1, 3]
    assert counts["unreplicated"] >= 1


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
