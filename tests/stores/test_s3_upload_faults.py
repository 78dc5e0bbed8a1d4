"""Uploads of S3Store on a server's bad days: taken up, made again, or ended without a trace."""

import os

import pytest
from support.draining import Node, names
from support.failing import failing
from support.fault_proxy import SLOW_DOWN, refuse, where
from support.store_contract import MemoryJournal

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.stores.s3 import MIB


@pytest.fixture
def uploads(s3_server, s3_url):
    """Returns the uploads in progress, as the server knows them."""
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    return lambda: s3_server.uploads(bucket, prefix)


@pytest.mark.parametrize(
    ("fault", "reason"), [(SLOW_DOWN, "unavailable"), (refuse(400, "ExpiredToken"), "credentials")]
)
def test_an_outage_and_an_interrupt_leave_the_upload_to_the_next_process(fault, reason, open_store, proxy, uploads):
    data = os.urandom(33 * MIB)
    journal = MemoryJournal()
    proxy.plan = lambda *_: fault if proxy.counts["part"] > 2 else None
    with failing(reason):
        open_store(deadline_s=0.3, write_concurrency=1).upload("x", memoryview(data), journal=journal)
    assert len(uploads()) == 1
    proxy.plan = lambda name, number: None

    def interrupt_at_a_part(count):
        if count == 8 * MIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_store(write_concurrency=1).upload("x", memoryview(data), journal=journal, progress=interrupt_at_a_part)
    # The last one is configured with another part size; what was begun is finished as it was.
    again = open_store(part_size=10 * MIB)
    again.upload("x", memoryview(data), journal=journal)
    assert again.metrics.snapshot()["requests.part"] == 2
    assert again.get("x") == data
    assert uploads() == []
    assert journal.read() is None


def test_the_uploads_that_an_outage_cut_off_are_ended_once_a_later_save_replaces_them(
    open_store, proxy, uploads, memory_dir, s3_url
):
    """Each holds nearly a checkpoint on the server, and a drain that lives for weeks looks for such only at its start."""
    node, patient = Node(memory_dir, s3_url), Clock(Timing(redo_first_s=600.0, redo_max_s=600.0))
    proxy.plan = lambda name, number: SLOW_DOWN if name == "part" and number > 1 else None
    for name in ("a.ckpt", "b.ckpt"):
        node.save(name, os.urandom(10 * MIB))
    drain = Drain(node.root, clock=patient, open_store=lambda *_: open_store(deadline_s=0.1, write_concurrency=1))
    drain.run(once=True)
    assert set(node.states().values()) == {"failed"}
    assert len(uploads()) == 2
    proxy.plan = lambda *_: None
    node.save("c.ckpt", b"C")
    drain.run(once=True)
    assert sorted(node.states().values()) == ["committed", "skipped", "skipped"]
    assert names(open_store()) == ["c.ckpt"]
    assert uploads() == []


DENIED = refuse(403, "AccessDenied")


@pytest.mark.parametrize(("status", "code"), [(400, "BadDigest"), (400, "IncompleteBody"), (524, "")])
def test_a_part_that_was_damaged_on_its_way_is_sent_again(status, code, open_store, proxy):
    data = os.urandom(17 * MIB)
    proxy.plan = where(refuse(status, code), operation="part", calls=[2])
    store = open_store(write_concurrency=1)
    store.upload("x", memoryview(data), journal=MemoryJournal())
    assert store.get("x") == data
    # A gateway's failure may mean anything: only then is the upload asked after.
    assert [proxy.counts[name] for name in ("create", "part", "list_parts")] == [1, 4, int(status > 500)]


def test_a_refused_part_ends_the_upload_and_leaves_nothing(open_store, proxy, uploads):
    journal = MemoryJournal()
    proxy.plan = where(DENIED, operation="part", calls=[2])
    store = open_store(write_concurrency=1)
    with failing("access"):
        store.upload("x", memoryview(bytes(33 * MIB)), journal=journal)
    assert proxy.counts["part"] == 2
    assert uploads() == []
    assert journal.read() is None


def test_forgotten_uploads_are_aborted_below_the_prefix_alone(open_store, uploads, s3_bucket, s3_server):
    for key in ("run/old", "other/old"):
        s3_server.client.create_multipart_upload(Bucket=s3_bucket, Key=key)
    store = open_store(f"s3://{s3_bucket}/run", endpoint_url=s3_server.endpoint_url)
    assert store.abort_stale_uploads() == 0
    assert store.abort_stale_uploads(older_than_s=-60) == 1
    assert [upload["Key"] for upload in s3_server.uploads(s3_bucket)] == ["other/old"]
    assert store.abort_stale_uploads(older_than_s=-60) == 0
    whole_bucket = open_store(f"s3://{s3_bucket}", endpoint_url=s3_server.endpoint_url)
    assert whole_bucket.abort_stale_uploads(older_than_s=-60) == 0


def test_an_upload_that_others_aborted_after_its_last_part_is_made_again(open_store, proxy, uploads, s3_server, s3_url):
    data = os.urandom(17 * MIB)
    # Ceph's answer: "this multipart completion is already in progress", for ever.
    proxy.plan = where(refuse(500, "InternalError"), operation="complete", calls=[1, 2, 3])
    seen = []

    def abort_at_the_last_part(count):
        seen.append(count)
        if sum(seen) == len(data):
            s3_server.empty(*s3_url.removeprefix("s3://").split("/", 1))
            # It is not taken for what the upload has made.
            open_store().put("x", bytes(len(data)))

    open_store().upload("x", memoryview(data), journal=MemoryJournal(), progress=abort_at_the_last_part)
    assert open_store().get("x") == data
    assert sum(seen) == len(data), "no byte is counted twice"
    assert uploads() == []
    # Asked after at once: it does not wait until the server gives up on it.
    assert (proxy.counts["create"], proxy.counts["complete"]) == (2, 4)


@pytest.mark.parametrize("denied", [{"list_parts"}, {"list_parts", "abort"}])
def test_an_interrupted_upload_that_may_not_be_asked_after_is_made_again(denied, open_store, proxy, uploads, caplog):
    data, journal = os.urandom(33 * MIB), MemoryJournal()
    proxy.plan = lambda name, number: SLOW_DOWN if name == "part" and number > 2 else None
    with failing("unavailable"):
        open_store(deadline_s=0.1, write_concurrency=1).upload("x", memoryview(data), journal=journal)
    # Other credentials may ask: with these the upload stops, and no part is lost.
    proxy.plan = where(refuse(400, "ExpiredToken"), operation="list_parts")
    with failing("credentials", match="ExpiredToken"):
        open_store().upload("x", memoryview(data), journal=journal)
    assert (len(uploads()), journal.read() is None, proxy.counts["abort"]) == (1, False, 0)
    proxy.plan = lambda name, _: DENIED if name in denied else None
    open_store().upload("x", memoryview(data), journal=journal)
    assert open_store().get("x") == data
    assert journal.read() is None
    assert "what has arrived of x is sent again: S3 list_parts failed (AccessDenied, HTTP 403)" in caplog.text
    assert "this needs s3:ListMultipartUploadParts" in caplog.text
    assert len(uploads()) == ("parts of an upload stay on the server" in caplog.text) == ("abort" in denied)
