"""Directory buckets (S3 Express): moto behind a proxy that refuses what they refuse, as no server at hand has such."""

import contextlib
import os

import pytest
from support.clocks import quick
from support.failing import failing
from support.fault_proxy import FaultProxy, directory_bucket, refuse
from support.rclone_server import S3Server

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.s3 import S3Store

SAVE = "20260101T000000.000000-00000000-00000001"


@pytest.fixture
def proxy(moto):
    with FaultProxy(moto.endpoint_url, lambda *_: directory_bucket) as proxy:
        yield proxy


@pytest.fixture
def store(proxy):
    server, bucket = S3Server(proxy.endpoint_url, "testing", "testing"), f"{os.urandom(4).hex()}--use1-az4--x-s3"
    server.make_bucket(bucket)
    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    with contextlib.closing(
        S3Store(
            f"s3://{bucket}/run",
            endpoint_url=proxy.endpoint_url,
            region="us-east-1",
            credentials=keys,
            clock=quick(retry_first_wait_s=0.01),
        )
    ) as store:
        yield store
    proxy.plan = lambda *_: directory_bucket
    server.remove_bucket(bucket)
    server.client.close()


def test_a_session_that_is_refused_is_named(store, proxy):
    proxy.plan = lambda *_: refuse(403, "AccessDenied")
    with failing("credentials", match=r"could not be had: CreateSession failed \(AccessDenied, HTTP 403\)"):
        store.put("a.ckpt", b"A")
    proxy.plan = lambda *_: refuse(503, "SlowDown") if proxy.counts["get"] < 4 else directory_bucket
    store.put("a.ckpt", b"A")
    assert store.get("a.ckpt") == b"A"


def test_a_list_by_the_beginning_of_a_name_finds_these_alone(store):
    """Descriptions of parts, and the index of a save, are looked for so."""
    described = [ids.description_key(SAVE, rank) for rank in (0, 7, 1000)]
    for key in (*described, ids.index_key(SAVE), ids.PREFLIGHT_PREFIX + "x", "a.ckpt"):
        store.put(key, b"{}")
    first, second = ids.description_prefixes(SAVE, [0, 1000])
    assert {entry.key for entry in store.list(first)} == set(described[:2])
    assert {entry.key for entry in store.list(second)} == {described[2]}
    assert [entry.key for entry in store.list(ids.index_key(SAVE))] == [ids.index_key(SAVE)]
    assert [entry.key for entry in store.list("a.")] == ["a.ckpt"]
    assert len(list(store.list(""))) == 6
