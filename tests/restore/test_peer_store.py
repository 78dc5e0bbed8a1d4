"""The memory of a node as other nodes read it: only by the token, whole or not at all, and never for longer than bounds."""

import contextlib
import logging
import os
import random
import re
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.failing import failing
from support.restoring import make_content

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.chunks import Copies, Copy, SlotDestination, read_part
from tiered_checkpoint_io.engine.drain.serving import Server, ask_to_serve, endpoint_of
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.engine.restore.peers import (
    CHILDREN,
    Peers,
    fan_out,
)
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores.peer import Endpoint, PeerStore

CHUNK = 300_000
#: More than the buffers of a connection take.
DATA = os.urandom(40 * CHUNK + 7)
CLOCK = Clock(Timing(peer_silence_s=0.5, peer_back_s=0.5, peer_busy_s=10.0, accept_poll_s=0.02))
LOG = logging.getLogger("test")
CONTENT = make_content("x.ckpt", DATA, 1, chunk=CHUNK)
KEY = f"{CONTENT.save_id}/0"
#: Upper limit of each bound, with the delays of a busy machine.
SOON_S = 5.0


class Node:
    """A node's memory with one part, and what serves it."""

    def __init__(self, folder, content=CONTENT, *, replica=False):
        os.mkdir(folder)
        self.tier = MemoryTier.open(folder, "default")
        tier = self.tier.replicas if replica else self.tier
        slot = tier.acquire(len(DATA))
        slot.view[: len(DATA)] = DATA
        part = Part("x.ckpt", 0, content, "s3://bucket/run", durable=False)
        self.stored = tier.commit(part, {content.files[0].basename: slot})
        self.path = self.stored.file(content.files[0].basename)
        self._stores = []
        ask_to_serve(self.tier.root, "127.0.0.1")
        self.serve()

    def serve(self):
        self.server = Server(self.tier.root, self.tier, LOG, CLOCK)
        self.server.look()
        self.endpoint = endpoint_of(self.tier.root)

    def store(self, token=None, **options):
        endpoint = self.endpoint if token is None else self.endpoint._replace(token=token)
        self._stores.append(PeerStore(endpoint, clock=CLOCK, **options))
        return self._stores[-1]

    def close(self):
        for each in (*self._stores, self.server, self.tier):
            each.close()

    @property
    def wrong_token(self):
        token = self.endpoint.token
        return token[:-1] + ("0" if token[-1] != "0" else "1")

    def connected(self):
        made = socket.create_connection(self.endpoint[:2], timeout=SOON_S)
        made.settimeout(SOON_S)
        return made

    def says(self, sent):
        """Returns the node's answer, until it ends the connection or has no more to say."""
        said = b""
        with self.connected() as made, contextlib.suppress(OSError):
            made.sendall(sent)
            while more := made.recv(1 << 16):
                said += more
        return said

    def request(self, target, more=""):
        return f"GET {target} HTTP/1.1\r\nAuthorization: Bearer {self.endpoint.token}\r\n{more}\r\n".encode()


@pytest.fixture
def nodes(memory_dir):
    made = []

    def node(**options):
        made.append(Node(f"{memory_dir}/{len(made)}", **options))
        return made[-1]

    yield node
    for each in made:
        each.close()


@pytest.fixture
def node(nodes):
    return nodes()


def fetched(*stores, skipped=None):
    """Returns a file's bytes, read from the first of the stores that has it intact."""
    skipped = skipped if skipped is not None else []
    copies = Copies(
        CONTENT.files[0],
        [Copy(lambda store=store: store, f"{KEY}/0") for store in stores],
        lambda store, entry, error: (skipped.append(str(error)), store.report_damage(entry.path)),
    )
    buffer = bytearray(len(DATA))
    copies.fetch(memoryview(buffer), concurrency=4)
    return buffer


# ------------------------------------------------------------------------------------------ reading
def test_a_part_is_described_and_read_in_ranges_over_few_connections(node):
    with contextlib.closing(node.store()) as store:
        assert Part.from_json(store.get(KEY), where="peer") == node.stored.part
        assert fetched(store) == DATA
        assert store.metrics.snapshot() in [{"bytes.down": len(DATA), "requests.connect": n} for n in range(1, 5)]
        some = memoryview(bytearray(10))
        store.read_into(f"{KEY}/0", 5, some)
        assert some == DATA[5:15]


# --------------------------------------------------------------------------------- bad peers, readers
def silent(connection):
    connection.recv(1000)
    time.sleep(SOON_S)


def dripping(connection):
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 206 OK\r\nContent-Length: %d\r\n\r\n" % CHUNK)
    with contextlib.suppress(OSError):
        for _ in range(1000):
            connection.sendall(b"x")
            time.sleep(0.01)


def lying(connection):
    while connection.recv(1000):
        connection.sendall(b"HTTP/1.1 206 OK\r\nContent-Length: %d\r\n\r\n" % CHUNK + bytes(CHUNK))


def saying(said):
    def answer(connection):
        connection.recv(1000)
        connection.sendall(said)

    return answer


ENDING = saying(b"HTTP/1.1 206 OK\r\nContent-Length: %d\r\n\r\nhalf" % CHUNK)
BOASTING = saying(b"HTTP/1.1 206 OK\r\nContent-Length: 999999999999\r\n\r\n")
BABBLING = saying(random.Random(1).randbytes(500))


@contextlib.contextmanager
def peer_that_is(behaviour):
    """Reads from something that listens, and behaves so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection):
            with connection, contextlib.suppress(OSError):
                behaviour(connection)

        threading.Thread(target=accept, daemon=True).start()
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], "ab")
        with contextlib.closing(PeerStore(endpoint, clock=CLOCK)) as store:
            yield store
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("behaviour", [silent, dripping, lying, ENDING, BOASTING, BABBLING])
def test_a_bad_peer_costs_a_bounded_time_and_leads_to_the_next(node, behaviour):
    began, skipped = time.monotonic(), []
    with peer_that_is(behaviour) as bad, contextlib.closing(node.store()) as good:
        assert fetched(bad, good, skipped=skipped) == DATA
        assert len(skipped) == 1, skipped
        with pytest.raises(CorruptCheckpointError) as none_left:
            fetched(bad)
    assert bad.url in str(none_left.value) or skipped[0][:30] in str(none_left.value)
    assert time.monotonic() - began < 2 * SOON_S


def test_a_peer_that_is_gone_or_of_another_job_leads_to_the_next(node, nodes):
    gone, other = nodes(), nodes()
    gone.server.close()
    other.tier.remove(other.stored)
    skipped = []
    assert fetched(gone.store(), other.store(), node.store(node.wrong_token), node.store(), skipped=skipped) == DATA
    assert [re.search("refused|no longer|another job", each)[0] for each in skipped] == [
        "refused",
        "no longer",
        "another job",
    ]


# -------------------------------------------------------------------------------------- strangers
def test_nothing_is_said_without_the_token(node):
    for token in ("", "0" * 64, node.wrong_token, node.endpoint.token + "0", "é"):
        with failing("access"):
            node.store(token).get(KEY)
    said = node.says(f"GET /{KEY} HTTP/1.1\r\n\r\n".encode())
    assert said.startswith(b"HTTP/1.1 401") and len(said) < 200
    assert node.says(b"GET / HTTP/1.1\r\n" + bytes(5000)).startswith(b"HTTP/1.1 400")


TARGETS = ["../../etc/passwd", "{save}/%2e%2e/0", "/{save}/0", "a" * 60 + "/0", "x/0"]
OF_THE_PART = ["../part.json", "99", "0?x=1", "-1", "part.json"]
RANGES = {f"{len(DATA) - 1}-{len(DATA)}": b"416", "0-99999999999999": b"400", f"0-{10**30}": b"400", "9-3": b"400"}


def test_it_is_only_read_by_names_and_ranges_of_a_part(shared):
    """No path comes from outside, and not all of a file is sent."""
    some = "Range: bytes=0-9\r\n"
    for target in (*TARGETS, *("{save}/0/" + each for each in OF_THE_PART)):
        asked = shared.request(f"/{target}".format(save=CONTENT.save_id), some)
        assert shared.says(asked).startswith(b"HTTP/1.1 400"), target
    for asked, status in RANGES.items():
        said = shared.says(shared.request(f"/{KEY}/0", f"Range: bytes={asked}\r\n"))
        assert said.startswith(b"HTTP/1.1 " + status), asked
    assert shared.says(shared.request(f"/{KEY}/0")).startswith(b"HTTP/1.1 400")
    for method in (b"PUT", b"POST", b"DELETE", b"HEAD", b"get"):
        asked = shared.request(f"/{KEY}/0", some).replace(b"GET", method, 1)
        assert shared.says(asked).startswith(b"HTTP/1.1 400"), method


@given(st.binary(max_size=6000))
def test_garbage_is_refused_or_dropped(shared, data):
    assert not shared.says(data + b"\r\n\r\n") or shared.says(data + b"\r\n\r\n").startswith(b"HTTP/1.1 40")


@pytest.fixture(scope="module")
def shared():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.closing(Node(f"{folder}/0")) as node:
        yield node


def test_who_says_nothing_or_reads_nothing_is_dropped_and_keeps_no_place(node):
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(node.connected()) for _ in range(3)]
        strangers[1].sendall(b"GET / HT")
        strangers[2].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        strangers[2].sendall(node.request(f"/{KEY}/0", f"Range: bytes=0-{len(DATA) - 1}\r\n"))
        assert fetched(node.store()) == DATA, "others are served meanwhile"
        deadline = time.monotonic() + SOON_S + len(DATA) / (1 << 20)
        while node.server.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert node.server.connections == 0


def test_only_the_address_that_is_asked_for_is_listened_on(node):
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", node.endpoint.port), timeout=SOON_S)
    for path in node.tier.root.glob("serve.*"):
        assert path.stat().st_mode & 0o077 == 0
    ask_to_serve(node.tier.root, "")
    node.server.look()
    with failing("unavailable"):
        node.store().get("")


# ----------------------------------------------------------------------------------------- owners
# ------------------------------------------------------------------------------------------ fan-out
def full(holders):
    return Candidate("x.ckpt", CONTENT, held={node: {0: True} for node in holders}, files={"x.ckpt": 0})


@pytest.mark.parametrize(("count", "holders", "most"), [(4, 1, 2.2), (128, 1, 2.2), (1024, 1, 2.3), (1024, 8, 2.3)])
def test_a_copy_reaches_many_nodes_in_the_time_of_two(count, holders, most):
    """Each node sends one chunk in a unit of time, by turns to its readers, and only what it has; times by that clock."""
    nodes = [f"n{number}" for number in range(count)]
    sources = fan_out(full(nodes[:holders]), nodes)
    readers = {source: [node for node in sources if sources[node] == source] for source in nodes}
    assert set(sources) == set(nodes[holders:])
    assert max(len(each) for each in readers.values()) <= CHILDREN
    chunks, has, ticks = 100, dict.fromkeys(nodes, 0), 0
    has |= dict.fromkeys(nodes[:holders], 100)
    while min(has.values()) < chunks:
        ticks += 1
        sent = [min(readers[node], key=has.get) for node in nodes if readers[node]]
        for node in [each for each in sent if has[each] < has[sources[each]]]:
            has[node] += 1
    assert ticks <= most * chunks


def test_nodes_pass_on_what_they_have_verified_while_they_read(nodes, memory_dir):
    """One node has the file; the others read it at the same time, each from the next one. A reader that fails is passed by."""
    made = {"a": nodes()}
    wanted, names = full("a"), list("abcdefg")
    tiers = {}
    for name in names[1:]:
        os.mkdir(folder := f"{memory_dir}/of-{name}")
        config = TieredCheckpointConfig(dirpath="s3://bucket/run", memory_dir=folder)
        tiers[name] = Tiers(config, MemoryTier.open(folder, "default"), lambda: None, config.dirpath, LOG, CLOCK)
        ask_to_serve(tiers[name].memory.root, "127.0.0.1")
        made[name] = Server(tiers[name].memory.root, tiers[name].memory, LOG, CLOCK)
        made[name].look()
    ends = {name: endpoint_of(tiers[name].memory.root) for name in names[1:]} | {"a": made["a"].endpoint}
    lost = "c"

    def read(name):
        peers = Peers(tiers[name], wanted, ends, name, names)
        with contextlib.closing(peers):
            part, copies = peers.copies_of_part(0)
            return read_part(copies, SlotDestination(tiers[name].memory, part, drained=True)), peers.rejected

    with ThreadPoolExecutor(8) as threads:
        found = dict(
            zip(names[1:], threads.map(lambda name: None if name == lost else read(name), names[1:]), strict=True)
        )
    for name in set(names[1:]) - {lost}:
        stored, rejected = found[name]
        assert stored.file("x.ckpt").read_bytes() == DATA
        assert len(rejected) == (fan_out(wanted, names)[name] == lost)
        assert not os.listdir(tiers[name].memory.root / "incoming")
        made[name].close()
        tiers[name].memory.close()
    made[lost].close()
