"""Requests of ranks to the store of torch.distributed, to keep copies and to find them: few, and bounded."""

import itertools
import json
import logging
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.clocks import VirtualClock, quick

from tiered_checkpoint_io.engine.ranks.store_client import PeerError, StoreClient
from tiered_checkpoint_io.engine.replication.local_peers import LocalPeers
from tiered_checkpoint_io.engine.replication.replicator import Keeper, Offers
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


# ----------------------------------------------------------------------------------- local loads
@pytest.fixture
def loading():
    """Makes the ranks of a job, on nodes (a letter a rank) of which nothing can be read."""
    made, origin = [], dist.HashStore()

    def rank_on(node, rank, count):
        clock = quick(local_poll_s=0.01, local_linger_s=0.05, peer_back_s=0.0)
        facts = {"tier": None, "clock": clock, "rank": rank, "world_size": count, "log": LOG, "timeout_s": 5.0}
        endpoint = Endpoint(f"127.0.0.{ord(node)}", 1, "ab")
        return LocalPeers(SimpleNamespace(store=CountedStore(origin), serve=lambda: endpoint, **facts))

    def make(nodes):
        made.extend(rank_on(node, rank, len(nodes)) for rank, node in enumerate(nodes))
        return made[-len(nodes) :]

    yield make
    for each in made:
        each._store.close()


def test_a_rank_reads_its_part_from_each_node_that_has_it_once_and_ranks_begin_with_different_ones(loading):
    nodes = "aabbcc"
    ranks = loading(nodes)
    for each, node in zip(ranks, nodes, strict=True):
        each.begin("load", {("save", shard): 6 for shard in (0, 1)} if node != "a" else {})
    tried = []
    for shard in (0, 1):
        part, notes = ranks[shard].fetch("load", "save", shard)
        assert part is None
        tried.append([note.partition("(")[2].partition(")")[0] for note in notes])
    assert sorted(tried[0]) == sorted(tried[1]) == [f"127.0.0.{ord(node)}" for node in "bc"]
    assert tried[0] != tried[1]


@pytest.mark.parametrize("held", [{}, {("save", 0): 1}])
def test_what_a_rank_asks_at_a_load_does_not_grow_with_the_job(loading, held):
    """All ranks ask one store, in the process of rank 0: requests of each for each of the others are too many there."""
    asked = []
    for count in (4, 32):
        ranks, load = loading("a" * count), f"load-{count}"
        for each in ranks:
            each.begin(load, held if each is ranks[0] else {})
        for each in reversed(ranks):
            assert each.newest(load, lambda: None) == ("save" if held else None)
            if held and each is not ranks[0]:
                each.fetch(load, "save", 0)
            elif not held:
                each.await_choice(load, lambda: None)
            each.end(load)
        asked.append(max(sum(each._store.counts.values()) for each in ranks))
    assert asked[0] == asked[1] < 20


def test_a_rank_that_waits_long_asks_more_and_more_rarely(store):
    """The other one has died."""
    clock, asked = VirtualClock(), []
    object.__setattr__(clock, "sleep", clock.advance)
    facts = {"tier": None, "clock": clock, "rank": 0, "world_size": 2, "log": LOG, "timeout_s": 60.0}
    one = LocalPeers(SimpleNamespace(store=store, serve=lambda: NOWHERE, **facts))
    one.begin("load", {("save", 0): 2})
    assert one.newest("load", lambda: asked.append(clock.now)) is None
    assert 60.0 < asked[-1] < 62.5
    assert len(asked) < 80
    assert all(later >= earlier for earlier, later in itertools.pairwise(asked))
