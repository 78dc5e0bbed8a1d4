"""Copies that a server makes of large objects, in parts, and servers that can't: moto copies parts, rclone does not."""

import contextlib
import os

import pytest
from support.failing import failing
from support.store_contract import MemoryJournal, StopHere, stop_here

from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.base import CopyRefusedError, ServerCopy, copy_to
from tiered_checkpoint_io.stores.s3 import MARK, MIB, S3Store

#: Limit above which a copy is made in parts; S3 itself takes 5 GiB at once.
PART = 5 * MIB
SIZE = 2 * PART + 5


@contextlib.contextmanager
def opened(endpoint_url, url, **options):
    store = S3Store(
        url,
        part_size=PART,
        write_concurrency=4,
        endpoint_url=endpoint_url,
        region="us-east-1",
        credentials={"aws_access_key_id": "testing", "aws_secret_access_key": "testing"},
        write_options=options,
    )
    store._copy_whole = store._copy_part = PART
    with contextlib.closing(store):
        yield store


@pytest.fixture
def store(moto, bucket):
    with opened(moto.endpoint_url, f"s3://{bucket}/run") as store:
        yield store


def put(store, key, data=None):
    data = data or os.urandom(SIZE)
    store.upload(key, memoryview(data))
    return data


def test_a_large_object_is_copied_in_parts_and_bears_a_mark_of_its_own(store, moto, bucket):
    data = put(store, "step_1.ckpt")
    before, seen = store.metrics.snapshot(), []
    copy_to(store, "last.ckpt", ServerCopy("step_1.ckpt", SIZE, lambda: None), progress=seen.append)
    counts = {name: count - before.get(name, 0) for name, count in store.metrics.snapshot().items()}
    assert {name: count for name, count in counts.items() if name.startswith("requests.") and count} == {
        "requests.head": 1,
        "requests.create": 1,
        "requests.copy": 2,
        "requests.list_parts": 1,
        "requests.complete": 1,
    }
    assert counts["bytes.sent"] == counts["bytes.up"] == 0
    assert (sum(seen), counts["bytes.copied"]) == (SIZE, SIZE)
    assert store.get("last.ckpt") == data
    marks = {
        moto.client.head_object(Bucket=bucket, Key=f"run/{key}.ckpt")["Metadata"][MARK] for key in ("last", "step_1")
    }
    assert len(marks) == 2


@pytest.mark.parametrize("size", [1000, pytest.param(SIZE, marks=pytest.mark.matrix)])
def test_a_copy_has_the_options_of_uploads(moto, bucket, size):
    options = {"ServerSideEncryption": "AES256", "StorageClass": "STANDARD_IA", "ChecksumAlgorithm": "SHA256"}
    with opened(moto.endpoint_url, f"s3://{bucket}/run", **options) as store:
        data = put(store, "a", os.urandom(size))
        copy_to(store, "b", ServerCopy("a", size, lambda: None))
        assert store.get("b") == data
    facts = moto.client.head_object(Bucket=bucket, Key="run/b")
    assert (facts["ServerSideEncryption"], facts["StorageClass"]) == ("AES256", "STANDARD_IA")


def test_a_copy_in_parts_that_was_stopped_is_taken_up(store, moto, bucket):
    data, journal = put(store, "a"), MemoryJournal()
    copy = ServerCopy("a", SIZE, lambda: None)
    with pytest.raises(StopHere):
        copy_to(store, "b", copy, journal=journal, progress=stop_here)
    assert journal.read()
    before = store.metrics.snapshot()
    copy_to(store, "b", copy, journal=journal)
    counts = store.metrics.snapshot()
    assert counts["requests.create"] == before["requests.create"]
    assert store.get("b") == data
    assert journal.read() is None


@pytest.mark.parametrize("then", ["another source", "an upload"])
def test_parts_of_one_source_never_get_into_another_object(store, moto, bucket, then):
    put(store, "a")
    journal = MemoryJournal()
    with pytest.raises(StopHere):
        copy_to(store, "b", ServerCopy("a", SIZE, lambda: None), journal=journal, progress=stop_here)
    if then == "an upload":
        data = os.urandom(SIZE)
        store.upload("b", memoryview(data), journal=journal)
    else:
        data = put(store, "a")
        copy_to(store, "b", ServerCopy("a", SIZE, lambda: None), journal=journal)
    assert store.get("b") == data
    assert moto.uploads(bucket) == []


def test_a_source_that_changes_while_parts_are_copied_ends_the_copy(store, moto, bucket):
    """moto ignores the ETag, as rclone does: so does this find out."""
    put(store, "a")
    store.put("b", b"old")
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 2:
            raise StoreError("changed", operation="copy", key="a", reason="unavailable")

    with failing("unavailable"):
        copy_to(store, "b", ServerCopy("a", SIZE, check))
    assert store.get("b") == b"old"
    assert moto.uploads(bucket) == []


@pytest.mark.skipif("TIERED_TEST_S3_ENDPOINT" in os.environ, reason="only rclone does that")
def test_a_server_that_takes_copied_parts_for_empty_ones_is_found_out(s3_server, s3_url):
    with contextlib.closing(S3Store(s3_url, part_size=PART, endpoint_url=s3_server.endpoint_url)) as store:
        store._copy_whole = store._copy_part = PART
        put(store, "a")
        store.put("b", b"old")
        with pytest.raises(CopyRefusedError, match="copy parts"):
            copy_to(store, "b", ServerCopy("a", SIZE, lambda: None), journal=MemoryJournal())
        assert store.get("b") == b"old"
        bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
        assert s3_server.uploads(bucket, prefix) == []
