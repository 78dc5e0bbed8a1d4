"""How two ranks get together for a transfer: a request is either taken or withdrawn, never both, never neither."""

import io
import json
import logging
import queue
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.clocks import VirtualClock, quick

from tiered_checkpoint_io.engine.ranks.store_client import LostStoreError, PeerError, StoreClient
from tiered_checkpoint_io.engine.ranks.transfer import receive_description
from tiered_checkpoint_io.engine.replication import replica_sender
from tiered_checkpoint_io.engine.replication.local_peers import LocalPeers
from tiered_checkpoint_io.engine.replication.peer_link import request, take_request
from tiered_checkpoint_io.engine.replication.replica_receiver import ReplicaReceiver
from tiered_checkpoint_io.engine.replication.replica_sender import ReplicaSender

KEY = "offer/0/1"


@pytest.fixture
def store():
    client = StoreClient(dist.HashStore(), "test", timeout_s=10.0)
    yield client
    client.close()
    for thread in [each for each in threading.enumerate() if each.name == "tiered-store"]:
        # Of a connection that was given up: it ends by itself.
        thread.join(10)
        assert not thread.is_alive()


def ask(store, *, meanwhile=lambda: None, **options):
    """A request that waits for a second; ``meanwhile`` happens at each look whether it was taken."""
    clock = VirtualClock()
    clock.sleep = lambda seconds: (meanwhile(), clock.advance(seconds))
    member = SimpleNamespace(store=store, clock=clock)
    request(member, KEY, "a part", bound_s=1.0, poll_s=0.25, **options)


def test_what_is_taken_is_no_longer_on_offer(store):
    taken = []
    ask(store, meanwhile=lambda: taken.append(take_request(store, KEY)))
    assert taken == ["a part"]
    assert take_request(store, KEY) is None
    # The next one is a new one, though it says the same.
    ask(store, meanwhile=lambda: taken.append(take_request(store, KEY)))
    assert taken == ["a part", "a part"]


def test_a_key_that_goes_while_it_is_read_costs_neither_time_nor_the_connection():
    """As an offer does, which its source withdraws while its peer looks for it."""
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


@pytest.mark.parametrize(
    ("options", "says"), [({}, "did not answer within 1 s"), ({"has_left": lambda: True}, "has ended")]
)
def test_a_request_that_is_given_up_is_taken_by_no_rank(store, options, says):
    with pytest.raises(PeerError, match=says):
        ask(store, **options)
    assert take_request(store, KEY) is None


def test_a_request_that_is_taken_while_it_is_given_up_counts(store):
    taken = []
    ask(store, has_left=lambda: taken.append(take_request(store, KEY)) or True)
    assert taken == ["a part"]


def test_a_store_that_is_gone_is_an_error_and_asked_anew_the_next_time(store):
    def fails(_):
        raise RuntimeError("Connection reset by peer\nframe #0: c10d::TCPStore")

    with pytest.raises(PeerError, match=r"can't be asked: Connection reset by peer .operation=agree."):
        store.ask(fails)
    store.set("key", "value")
    assert (store.get("key"), store.get("other"), store.add("n", 2), store.add("n", 0)) == ("value", None, 2, 2)


# --------------------------------------------------------------------------- what comes over a link
class Wire:
    """A channel whose other end has sent so much already."""

    name = "rank 1"

    def __init__(self):
        self._sent = io.BytesIO()

    def send(self, data):
        self._sent.write(data)
        self._sent.seek(0)

    def receive(self, data):
        assert self._sent.readinto(data) == len(data)


@pytest.mark.parametrize("size", [str(10 << 40), "-1", "many", "9" * 1000, ""])
def test_a_description_of_no_possible_size_takes_no_memory(size):
    wire = Wire()
    wire.send(b" " * 1024 + size.encode().ljust(1024))
    with pytest.raises(PeerError, match="bytes was announced"):
        receive_description(wire)


# ------------------------------------------------------------------- a rank that serves local loads
class LateStore(StoreClient):
    """Does not answer in time for as many requests as ``late`` says."""

    late = 0

    def ask(self, request):
        if self.late:
            self.late -= 1
            raise LostStoreError("no answer within 10 s", operation="agree")
        return super().ask(request)


class Peers(LocalPeers):
    """Notes what it is asked to send, and whom it asks, and moves nothing."""

    def __init__(self, store, *, rank=0, world_size=2):
        bounds = {"local_poll_s": 0.01, "offer_retry_s": 0.02, "local_taken_s": 0.1, "local_linger_s": 0.05}
        log = logging.getLogger("test.peers")
        super().__init__(
            SimpleNamespace(
                tier=None,
                store=store,
                clock=quick(**bounds),
                rank=rank,
                world_size=world_size,
                log=log,
                timeout_s=5.0,
            )
        )
        self.given, self.tried = queue.SimpleQueue(), []

    def _give(self, key, target, save_id, shard):
        self.given.put([target, save_id, shard])

    def _get(self, source, save_id, shard):
        self.tried.append(source)
        raise PeerError("the peer did not answer", operation="replicate")


@pytest.fixture
def peers(store):
    its_store = LateStore(store._origin, "test", timeout_s=10.0)
    serving = Peers(its_store)
    serving.begin("load-1", {})
    yield serving
    its_store.late = 0
    serving.close()


def ask_serving(store, peers):
    """Asks as another rank does, for longer than any wait of the serving one."""
    member = SimpleNamespace(store=store, clock=quick())
    key = f"ask/0/{store.add('asked/0')}"
    request(member, key, json.dumps([1, "save", 7]), bound_s=5.0, poll_s=0.01)
    assert peers.given.get(timeout=5) == [1, "save", 7]


@pytest.mark.parametrize("late", [1, 5])
def test_a_rank_serves_on_after_answers_of_the_store_that_were_late(store, peers, late):
    ask_serving(store, peers)
    peers._store.late = late
    ask_serving(store, peers)
    assert peers._store.late == 0


def test_a_thread_that_has_ended_begins_anew_with_the_next_load(store, peers):
    peers._is_closing = True
    peers._thread.join(5)
    peers._is_closing = False
    peers.begin("load-2", {})
    ask_serving(store, peers)


def test_a_request_that_was_counted_and_never_made_holds_up_no_other_for_good(store, peers):
    """Its rank has died between the two."""
    store.add("asked/0")
    ask_serving(store, peers)


# --------------------------------------------------------------------------- what the store is asked
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


class Loading(Peers):
    """One that serves nothing."""

    def _serve(self):
        pass


@pytest.fixture
def loading():
    """Makes the ranks of a job."""
    made, origin = [], dist.HashStore()

    def make(count):
        made.extend(Loading(CountedStore(origin), rank=rank, world_size=count) for rank in range(count))
        return made[-count:]

    yield make
    for each in made:
        each._store.close()


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.parametrize("nodes", ["aaaabbbb", "abababab", "abcdabcd"])
def test_the_ranks_of_a_lost_node_begin_with_holders_of_their_own_and_ask_each_once(loading, nodes, lost):
    """Each holder gives one part at a time; launchers number ranks node by node, or all nodes' first ones first."""
    ranks = loading(len(nodes))
    (other,) = {*"ab"} - {lost}
    shards = {rank for rank, node in enumerate(nodes) if node == lost}
    for each, node in zip(ranks, nodes, strict=True):
        each.begin("load", {("save", shard): 8 for shard in shards} if node == other else {})
    holders = [rank for rank, node in enumerate(nodes) if node == other]
    for shard in shards:
        part, notes = ranks[shard].fetch("load", "save", shard)
        assert (part, sorted(ranks[shard].tried), len(notes)) == (None, holders, len(holders))
    assert sorted(ranks[shard].tried[0] for shard in shards) == holders


@pytest.mark.parametrize("held", [{}, {("save", 0): 1}])
def test_what_a_rank_asks_at_a_load_does_not_grow_with_the_job(loading, held):
    """All ranks ask one store, in the process of rank 0: requests of each for each of the others are too many there."""
    asked = []
    for count in (4, 32):
        ranks, load = loading(count), f"load-{count}"
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


def test_a_choice_is_waited_for_while_a_rank_may_still_choose(loading):
    one, other = loading(2)
    one.begin("load", {("save", 0): 2})
    other.begin("load", {})
    chosen = []
    one._clock.start(lambda: (one._clock.sleep(0.1), chosen.append("save"), one.end("load")), "chooses")
    assert other.await_choice("load", lambda: next(iter(chosen), None)) == "save"
    # With no choice made, none is waited for any longer.
    assert other.await_choice("load", lambda: None) is None


def test_a_rank_that_waits_long_asks_more_and_more_rarely(loading):
    """The other one has died."""
    (one, _), asked = loading(2), []
    one._clock = VirtualClock()
    one._clock.sleep = one._clock.advance
    one._timing, one._timeout_s = one._clock.timing, 60.0
    one.begin("load", {("save", 0): 2})
    assert one.newest("load", lambda: asked.append(one._clock.now)) is None
    assert 60.0 < asked[-1] < 62.5
    assert len(asked) < 80


# ------------------------------------------------------------------------------- between two saves
NOTHING = SimpleNamespace(parts=list, replicas=SimpleNamespace(parts=list))
FATES = SimpleNamespace(
    begin=lambda _: True, count=lambda _: None, look=lambda: None, is_decided=lambda _: True, is_open=lambda _: False
)
PART = SimpleNamespace(save_id="save", rank=0, name="step_1", content=SimpleNamespace(step=1, size=1))


class Keeping(ReplicaReceiver):
    """Takes what is offered, and receives nothing."""

    def _take(self, source, key):
        self.taken = key


def test_a_rank_that_keeps_replicas_rarely_asks_between_saves_and_often_once_it_saves_itself(monkeypatch):
    """All ranks do, for the whole run, of one store in the process of rank 0."""
    monkeypatch.setattr(replica_sender, "send_description", lambda *_: None)
    monkeypatch.setattr(replica_sender, "send_held_part", lambda *_: "")
    monkeypatch.setattr(replica_sender, "Links", lambda *_, **__: SimpleNamespace(open=print, close_all=lambda: None))
    clock, store = VirtualClock(), CountedStore(dist.HashStore())
    facts = {"tier": NOTHING, "store": store, "clock": clock, "log": logging.getLogger("test.peers")}
    config = SimpleNamespace(memory_keep_last=2)
    members = [SimpleNamespace(rank=rank, config=config, timeout_s=60.0, **facts) for rank in (0, 1)]
    keeping = Keeping(members[1], [0], FATES)
    sending = ReplicaSender(members[0], (1,), Counter(), FATES)
    sending.offer(SimpleNamespace(part=PART, save_id="save"))
    while sending.pending:
        clock.advance(0.02, keeping._thread)
    assert (keeping.taken, sending.counts["replicated"]) == ("0/1/0", 1)
    before = sum(store.counts.values())
    clock.advance(600.0, keeping._thread)
    assert sum(store.counts.values()) - before < 400
    for number, (wakes, within_s) in enumerate([(False, 2.0), (True, 0.0)]):
        store.set("offer/0/1", str(number))
        if wakes:
            keeping.wake()
            while keeping._bell.is_set():
                clock.advance(0.0, keeping._thread)
        clock.advance(within_s, keeping._thread)
        assert keeping.taken == str(number)
        clock.advance(600.0, keeping._thread)
    store.set("ended/0")
    keeping.close()
    sending.close(1.0)
    store.close()
