"""Delta uploads: what an object has already is copied by the server, and never trusted. moto copies ranges, rclone not."""

import contextlib
import os

import pytest
from support.clocks import VirtualClock
from support.fault_proxy import FaultProxy, lose_answer, refuse

from tiered_checkpoint_io.errors import StoreAccessError
from tiered_checkpoint_io.model.delta import Same
from tiered_checkpoint_io.stores.base import Delta
from tiered_checkpoint_io.stores.s3 import MIB, S3Store
from tiered_checkpoint_io.testing.contract import MemoryJournal, StopHere, stop_here

pytestmark = pytest.mark.matrix

SIZE = 24 * MIB + 5
#: What a save leaves as it was, of a file whose first bytes, a few in the midst and the end change.
SAME = (Same(6 * MIB, 12 * MIB, "old", 6 * MIB), Same(16 * MIB, 24 * MIB, "old", 16 * MIB))
#: Of 4 MiB between the two S3 makes no part: one more is sent with them.
COPIED = 13 * MIB


@contextlib.contextmanager
def opened(server, endpoint_url, url):
    store = S3Store(
        url,
        part_size=8 * MIB,
        write_concurrency=4,
        endpoint_url=endpoint_url,
        region="us-east-1",
        credentials={"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key},
    )
    store._uploads._copy_part = 8 * MIB
    with contextlib.closing(store):
        yield store


@pytest.fixture
def proxy(copying):
    with FaultProxy(copying.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def store(copying, proxy, copying_bucket):
    with opened(copying, proxy.endpoint_url, f"s3://{copying_bucket}/run") as store:
        yield store


def changed_file(store):
    """The content of an object ``old``, and a file that has the ranges ``SAME`` in common with it."""
    old, new = os.urandom(SIZE), bytearray(os.urandom(SIZE))
    for each in SAME:
        new[each.start : each.stop] = old[each.offset : each.offset + each.stop - each.start]
    store.upload("old", memoryview(old))
    return old, bytes(new)


def sending(store, data, key="new", same=SAME, **options):
    """Uploads; gives what it took."""
    before = store.metrics.snapshot()
    store.upload(key, Delta(memoryview(data), same), **options)
    counts = store.metrics.snapshot()
    return {name: counts[name] - before.get(name, 0) for name in counts if counts[name] != before.get(name, 0)}


def test_only_what_changed_is_sent(store):
    _, new = changed_file(store)
    seen = []
    took = sending(store, new, progress=seen.append)
    assert store.get("new") == new
    assert (took["bytes.copied"], took["bytes.sent"], sum(seen)) == (COPIED, SIZE - COPIED, SIZE)
    assert {name: count for name, count in took.items() if name.startswith("requests.")} == {
        "requests.create": 1,
        "requests.copy": 2,
        "requests.part": 3,
        "requests.complete": 1,
    }


def test_an_object_is_overwritten_by_parts_of_itself(store):
    _, new = changed_file(store)
    store.upload_if("old", Delta(memoryview(new), SAME), store.tag("old"))
    assert store.get("old") == new
    assert store.metrics.snapshot()["bytes.copied"] == COPIED


@pytest.mark.parametrize(
    "source",
    [
        "flipped",
        "removed",
        "replaced",
        "shorter",
        "shorter, says the server",
        "not allowed",
        "an odd etag",
    ],
)
def test_whatever_the_source_is_the_object_is_the_file(store, proxy, copying, copying_bucket, source):
    old, new = changed_file(store)
    if source == "flipped":
        at = SAME[1].stop - 1
        store.upload("old", memoryview(old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]))
    elif source == "replaced":
        store.upload("old", memoryview(os.urandom(SIZE)))
    elif source == "shorter":
        store.put("old", old[: 20 * MIB])
    elif source == "removed":
        store.delete("old")
    elif source == "shorter, says the server":
        # As Ceph does, where moto gives what there is.
        proxy.plan = of_copies(refuse(416, "InvalidRange"))
    elif source == "not allowed":
        proxy.plan = of_copies(refuse(403, "AccessDenied"))
    seen, journal = [], MemoryJournal()
    if source == "an odd etag":
        proxy.plan = of_copies(odd_part)
    took = sending(store, new, journal=journal, progress=seen.append)
    assert store.get("new") == new
    assert (took.get("bytes.copied", 0), sum(seen)) == (0, SIZE)
    assert journal.read() is None
    assert copying.uploads(copying_bucket) == []


def of_copies(action):
    """A plan for the copies of parts alone, which look like parts that are sent but for a header."""

    def act(exchange):
        if exchange.headers.get("x-amz-copy-source"):
            action(exchange)
        else:
            status, headers, body = exchange.forward()
            exchange.answer(status, body, headers)

    return lambda request, _: act if request == "part" else None


def odd_part(exchange):
    """A copied part whose ETag is no digest, as where the bucket encrypts by KMS."""
    status, _, body = exchange.forward()
    exchange.answer(status, body.replace(b"<ETag>", b"<ETag>oddly"))


def test_after_two_refusals_in_a_row_copies_are_not_tried_for_a_while(store, proxy):
    _, new = changed_file(store)
    clock = store._uploads._clock = VirtualClock()
    proxy.plan = of_copies(refuse(501, "NotImplemented"))
    for key in ("a", "b"):
        assert sending(store, new, key)["requests.copy"] >= 1
    for key in ("c", "d"):
        assert "requests.copy" not in sending(store, new, key)
        assert store.get(key) == new
    # A refusal more begins the next pause.
    clock.advance(clock.timing.refused_again_s)
    assert sending(store, new, "e")["requests.copy"] >= 1
    assert "requests.copy" not in sending(store, new, "f")
    clock.advance(clock.timing.refused_again_s)
    proxy.plan = lambda *_: None
    for key in ("g", "h"):
        assert sending(store, new, key)["bytes.copied"] == COPIED


@pytest.mark.parametrize("code", ["ExpiredToken", "RequestTimeTooSkewed", "InvalidAccessKeyId"])
def test_credentials_that_end_on_the_way_say_nothing_of_the_server(store, proxy, copying, copying_bucket, code):
    _, new = changed_file(store)
    status = 400 if code == "ExpiredToken" else 403
    for key in ("a", "b"):
        journal, first = MemoryJournal(), proxy.counts["part"] + 1
        # The first copy arrives; then the credentials are not good any more.
        copies = of_copies(refuse(status, code))
        proxy.plan = lambda request, count, copies=copies, first=first: (
            copies(request, count) if count > first else None
        )
        with pytest.raises(StoreAccessError):
            sending(store, new, key, journal=journal)
        assert journal.read() is not None
        assert len(copying.uploads(copying_bucket)) == 1, "what has arrived stays for the next try"
        proxy.plan = lambda *_: None
        took = sending(store, new, key, journal=journal)
        assert "requests.create" not in took
        assert (store.get(key), took["bytes.copied"]) == (new, COPIED)
    assert sending(store, new, "c")["bytes.copied"] == COPIED


def test_a_source_that_is_gone_says_nothing_of_the_server(store):
    _, new = changed_file(store)
    for key in ("a", "b", "c"):
        sending(store, new, key, [each._replace(key="gone") for each in SAME])
    assert sending(store, new, "d")["bytes.copied"] == COPIED


@pytest.mark.parametrize("request_", ["part", "create", "complete"])
def test_a_lost_answer_is_no_lost_upload(store, proxy, request_):
    _, new = changed_file(store)
    number = proxy.counts[request_] + 1
    proxy.plan = lambda request, count: lose_answer if (request, count) == (request_, number) else None
    took = sending(store, new, journal=MemoryJournal())
    assert store.get("new") == new
    assert took["bytes.copied"] == COPIED


def test_a_stopped_upload_is_taken_up_and_what_had_arrived_is_looked_at_again(store, copying, copying_bucket):
    old, new = changed_file(store)
    journal = MemoryJournal()
    with pytest.raises(StopHere):
        sending(store, new, journal=journal, progress=stop_here)
    took = sending(store, new, journal=journal)
    assert "requests.create" not in took
    assert (store.get("new"), took["bytes.copied"]) == (new, COPIED)

    # Another file of this size, of which the parts that have arrived are not.
    with pytest.raises(StopHere):
        sending(store, new, "other", journal=journal, progress=stop_here)
    other = old[::-1]
    sending(store, other, "other", journal=journal)
    assert store.get("other") == other
    assert copying.uploads(copying_bucket) == []


def test_an_upload_that_was_begun_whole_goes_on_so(store):
    _, new = changed_file(store)
    journal = MemoryJournal()
    with pytest.raises(StopHere):
        store.upload("new", memoryview(new), journal=journal, progress=stop_here)
    took = sending(store, new, journal=journal)
    assert "requests.create" not in took
    assert "requests.copy" not in took
    assert store.get("new") == new


@pytest.mark.skipif("TIERED_TEST_S3_ENDPOINT" in os.environ, reason="only rclone does that")
def test_a_server_that_copies_no_ranges_is_sent_all(s3_server, s3_url):
    with contextlib.closing(S3Store(s3_url, part_size=8 * MIB, endpoint_url=s3_server.endpoint_url)) as store:
        _, new = changed_file(store)
        assert sending(store, new)["bytes.up"] == SIZE
        assert store.get("new") == new
        bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
        assert s3_server.uploads(bucket, prefix) == []
