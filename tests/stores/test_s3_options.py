"""Options that go out with requests, on a server that keeps them (moto)."""

import os
import socket
from dataclasses import replace

import pytest
from support.fault_proxy import FaultProxy, operation_of

from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.s3 import MIB


@pytest.fixture
def moto(moto, use_server):
    return use_server(moto)


@pytest.mark.parametrize("size", [1000, 20 * MIB])
def test_objects_bear_what_was_configured(moto, bucket, size):
    config = TieredCheckpointConfig(
        dirpath=f"s3://{bucket}/run",
        chunk_size_MB=8,
        endpoint_url=moto.endpoint_url,
        s3_options={
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "key-1",
            "StorageClass": "STANDARD_IA",
            "ACL": "bucket-owner-full-control",
            "ChecksumAlgorithm": "SHA256",
        },
    )
    # Writers and readers of equal configurations share a session.
    assert {config: "session"}[replace(config)] == "session"
    store = open_store(config)
    data = os.urandom(size)
    store.upload("x", memoryview(data))
    assert store.get("x") == data
    facts = moto.client.head_object(Bucket=bucket, Key="run/x", ChecksumMode="ENABLED")
    assert facts["ServerSideEncryption"] == "aws:kms"
    assert facts["SSEKMSKeyId"] == "key-1"
    assert facts["StorageClass"] == "STANDARD_IA"
    assert "ChecksumSHA256" in facts
    store.close()


def test_every_request_names_the_expected_owner_and_the_payer(moto, bucket):
    seen = {}

    def note(exchange):
        pair = tuple(exchange.headers.get(f"x-amz-{name}") for name in ("expected-bucket-owner", "request-payer"))
        seen[operation_of(exchange.command, exchange.path)] = pair
        exchange.pass_on()

    with FaultProxy(moto.endpoint_url, lambda *_: note) as proxy:
        config = TieredCheckpointConfig(
            dirpath=f"s3://{bucket}/run",
            chunk_size_MB=8,
            endpoint_url=proxy.endpoint_url,
            s3_options={"ExpectedBucketOwner": "111122223333", "RequestPayer": "requester"},
        )
        store = open_store(config)
        # moto's own account is another one, so each is refused, with a reason, by those that it checks.
        for call in (
            lambda: store.put("x", b"1"),
            lambda: store.get("x"),
            lambda: store.size("x"),
            lambda: list(store.list("")),
            lambda: store.upload("x", memoryview(bytes(20 * MIB))),
            lambda: store.delete("x"),
            store.abort_stale_uploads,
        ):
            try:
                call()
            except StoreError as error:
                if error.reason != "access":
                    raise
                assert "rights" in str(error)
        store.close()
    assert {"put", "get", "head", "list", "create", "part", "complete", "delete", "list_uploads"} <= set(seen)
    assert set(seen.values()) == {("111122223333", "requester")}


def test_an_access_point_in_a_buckets_place(moto, bucket, monkeypatch):
    """No server here has access points: requests to the host of one are turned to the bucket behind it (moto)."""
    resolve, host = socket.getaddrinfo, "name-123456789012."
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *rest, **how: resolve(name.removeprefix(host), *rest, **how)
    )

    def turn(exchange):
        assert exchange.headers["Host"].startswith(host)
        exchange.headers.replace_header("Host", exchange.headers["Host"].removeprefix(host))
        exchange.path = f"/{bucket}{exchange.path}"
        exchange.pass_on()

    url = "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/name"
    with FaultProxy(moto.endpoint_url, lambda *_: turn) as proxy:
        config = TieredCheckpointConfig(dirpath=f"{url}/run/", endpoint_url=proxy.endpoint_url, chunk_size_MB=8)
        assert config.dirpath == f"{url}/run"
        store = open_store(config)
        for size in (1000, 20 * MIB):
            data = os.urandom(size)
            store.upload("x", memoryview(data))
            assert store.get("x") == data
        assert [entry.key for entry in store.list("")] == ["x"]
        assert [entry["Key"] for entry in moto.client.list_objects_v2(Bucket=bucket)["Contents"]] == ["run/x"]
        store.delete("x")
        with pytest.raises(StoreNotFoundError, match="accesspoint/name/run/x"):
            store.get("x")
        store.close()
