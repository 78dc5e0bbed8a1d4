"""How two ranks get together for a transfer: a request is either taken or withdrawn, never both, never neither."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.clocks import VirtualClock

from tiered_checkpoint_io.engine.ranks.store_client import StoreClient
from tiered_checkpoint_io.engine.replication.peer_link import request, take_request
from tiered_checkpoint_io.errors import PeerError

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
