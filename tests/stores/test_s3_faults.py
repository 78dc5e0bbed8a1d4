"""Bad days of a server, as S3Store meets them; what is repeated, for how long, and what is not."""

import os

import pytest
from support.failing import failing
from support.fault_proxy import (
    SLOW_DOWN,
    answered_by_another,
    object_lock,
    refuse,
    reset,
    short_pages,
    truncate,
    where,
)
from support.store_contract import MemoryJournal

from tiered_checkpoint_io.stores import s3_client
from tiered_checkpoint_io.stores.base import folders_of
from tiered_checkpoint_io.stores.s3 import MIB
from tiered_checkpoint_io.stores.s3_errors import refusal

PASSING = [SLOW_DOWN, refuse(500, "InternalError"), refuse(502, ""), refuse(400, "RequestTimeout"), reset]


def test_each_request_survives_a_fault_that_passes(open_store, proxy):
    store = open_store()
    data = os.urandom(17 * MIB)
    buffer = bytearray(len(data))
    for fault in PASSING:

        def plan(operation, number, fault=fault):
            # The answer to a HEAD has no body with a code.
            return (SLOW_DOWN if operation == "head" else fault) if number == 1 else None

        proxy.counts.clear()
        proxy.plan = plan
        before = store.metrics.snapshot().get("retries", 0)
        store.put("small", b"12345")
        assert store.get("small") == b"12345"
        assert store.size("small") == 5
        store.upload("large", memoryview(data))
        store.read_into("large", 0, memoryview(buffer))
        assert bytes(buffer) == data
        assert sorted(entry.key for entry in store.list("")) == ["large", "small"]
        store.delete("small")
        # put, get, head, create, part, complete, list, delete: each was asked once too often.
        assert store.metrics.snapshot()["retries"] - before == 8
    # If a part or the last request of an upload got no answer, its upload is looked up as well.
    assert proxy.counts.pop("list_parts") == 2
    assert sum(proxy.counts.values()) == 8 + 8 + 3


@pytest.mark.parametrize("page", [b"", b"<!DOCTYPE html><html><body><p>Sign in</p></body></html>"])
def test_a_success_that_is_not_of_s3_is_asked_for_again(page, open_store, proxy):
    """Else a list would be an empty one, and an object one that is there."""
    store, data = open_store(), os.urandom(17 * MIB)
    proxy.plan = lambda operation, number: answered_by_another(page) if number == 1 and operation != "delete" else None
    store.put("small", b"12345")
    assert store.get("small") == b"12345"
    assert store.size("small") == 5
    assert [entry.key for entry in store.list("")] == ["small"]
    store.upload("large", memoryview(data))
    proxy.plan = where(answered_by_another(page), operation="get")
    with failing("unavailable", match="ForeignAnswer.*check endpoint_url"):
        open_store(deadline_s=0.1).get("small")
    proxy.plan = lambda *_: None
    assert store.get("large") == data


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("fault", [truncate(0), truncate(MIB + 3), truncate(5 * MIB - 1), reset])
def test_an_answer_that_breaks_off_amid_pieces_is_read_from_the_first_again(
    open_store, proxy, fault, is_private, monkeypatch
):
    """The pieces come by the connection behind boto3's body, or by the body if a release has no such connection."""
    if not is_private:
        monkeypatch.setattr(s3_client, "StreamingBody", None)
    store, data = open_store(), os.urandom(6 * MIB)
    store.upload("x", memoryview(data))
    pieces = [memoryview(bytearray(MIB)) for _ in range(5)]
    arrived, buffers = [], set()
    for number in range(3):
        proxy.plan = where(fault, operation="get", calls=[1])
        arrived.clear()
        store.read_pieces("x", 11, pieces, arrived.append)
        assert b"".join(pieces) == data[11 : 11 + 5 * MIB]
        assert arrived[-5:] == [*range(5)], "hashes begin anew with the first piece"
        assert store.metrics.snapshot()["retries"] == number + 1
        buffers.update(arrived[:-5])
    if fault is not reset:
        proxy.plan = lambda *_: None
        opened = proxy.connections
        for _ in range(4):
            store.read_pieces("x", 11, pieces, arrived.append)
        assert proxy.connections - opened <= 1, "what was read to its end leaves its connection to the next"


def test_pages_without_a_marker_are_followed_by_what_was_last(open_store, proxy):
    store, keys = open_store(), ["a", "b/1", "b/2", "c", "d/1", "e/1", "é"]
    for key in keys:
        store.put(key, b"1")
    proxy.plan = where(short_pages(2), operation="list")
    assert sorted(entry.key for entry in store.list("")) == sorted(keys)
    assert proxy.counts["list"] == 4
    assert folders_of(store, "") == {"b", "d", "e"}


def test_a_bucket_with_object_lock_gets_checksums(open_store, proxy):
    proxy.plan = lambda name, _: object_lock if name in ("put", "part") else None
    store, data = open_store(write_concurrency=1), os.urandom(17 * MIB)
    store.put("small", b"12345")
    store.put("small", b"123456")
    store.upload("large", memoryview(data), journal=MemoryJournal())
    assert (store.get("small"), store.get("large")) == (b"123456", data)
    # The refusal is learned once.
    assert (proxy.counts["put"], proxy.counts["part"]) == (3, 3)


MEANINGS = {
    "missing": {404: ["NoSuchKey", "404"]},
    "access": {403: ["AccessDenied", "403"]},
    "archived": {403: ["InvalidObjectState"]},
    "credentials": {403: ["InvalidAccessKeyId", "SignatureDoesNotMatch"], 400: ["ExpiredToken"]},
    "config": {
        301: ["PermanentRedirect", "301"],
        400: ["AuthorizationHeaderMalformed", "IllegalLocationConstraintException"],
        404: ["NoSuchBucket"],
    },
    "full": {507: ["XMinioStorageFull"], 403: ["QuotaExceeded"], 400: ["XMinioAdminBucketQuotaExceeded"]},
    "unavailable": {
        400: ["BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody", "RequestTimeout", "ThrottlingException"],
        429: ["TooManyRequests"],
        500: ["InternalError"],
        503: ["SlowDown", ""],
        504: ["GatewayTimeout"],
        520: ["520"],
    },
    None: {400: ["400", "EntityTooLarge"], 501: ["NotImplemented"]},
}


@pytest.mark.parametrize("reason", MEANINGS)
def test_what_a_refusal_means(reason):
    for status, code in ((status, code) for status, codes in MEANINGS[reason].items() for code in codes):
        error = refusal("get", code=code, status=status, url="s3://bucket-1/run", key="x", region="eu-x-1")
        assert (error.reason, error.retryable) == (reason, reason == "unavailable"), code
        assert error.key == "s3://bucket-1/run/x"
        assert reason != "config" or "bucket-1" in error.hint
        assert status != 301 or "eu-x-1" in error.hint
