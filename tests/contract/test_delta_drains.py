"""A drain sends what changed since the checkpoint before: full and sharded, in one process and across a restart."""

import contextlib
import itertools
import logging
import os
import threading
from dataclasses import replace

import pytest
from support.draining import Node, part_of, readable
from support.sharded import entry_of, make_part

from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.model.delta import Same
from tiered_checkpoint_io.model.hashing import MIN_CHUNK_SIZE
from tiered_checkpoint_io.stores.base import Delta
from tiered_checkpoint_io.stores.s3 import MIB, S3Store
from tiered_checkpoint_io.stores.s3_client import S3Client
from tiered_checkpoint_io.testing.contract import MemoryJournal

LOG = logging.getLogger("test")
SIZE = 2 * MIN_CHUNK_SIZE + 5


@pytest.fixture
def node(copying, copying_bucket, memory_dir, monkeypatch):
    for name, value in copying.env().items():
        monkeypatch.setenv(name, value)
    options = {"endpoint_url": copying.endpoint_url, "region": "us-east-1", "chunk_size_MB": 8, "delta_upload": True}
    node = Node(memory_dir, f"s3://{copying_bucket}/run", namespace="delta", **options)
    yield node
    node.tier.close()


def uploads(node):
    """Bytes that were copied, of each upload that was committed."""
    events = [each for each in read_events(node.root) if each["event"] == "upload"]
    assert {each["state"] for each in events} == {"committed"}
    return [each["copied_bytes"] for each in events]


def test_a_drain_sends_what_changed_since_the_save_before(node, copying, copying_bucket):
    first = os.urandom(SIZE)
    second = os.urandom(100) + first[100:]
    third = second[:-5] + b"other"
    node.save("a.ckpt", first)
    node.save("b.ckpt", second)
    assert Drain(node.root, logger=LOG).run(once=True)
    # Another process, which knows of the last upload by what is in memory.
    node.save("b.ckpt", third)
    assert Drain(node.root, logger=LOG).run(once=True)
    assert uploads(node) == [0, SIZE - MIN_CHUNK_SIZE, SIZE - 5]
    for name, data in (("a.ckpt", first), ("b.ckpt", third)):
        assert copying.client.get_object(Bucket=copying_bucket, Key=f"run/{name}")["Body"].read() == data


@pytest.mark.matrix
def test_shards_are_copied_from_the_files_of_the_save_before_whatever_their_names(node, copying, copying_bucket):
    frozen, trained = os.urandom(SIZE), os.urandom(SIZE)
    for number, changed in ((1, trained), (2, os.urandom(SIZE))):
        files = {f"__0_0-{number}.distcp": frozen, f"__0_1-{number}.distcp": changed, ".metadata": b"m"}
        part = make_part(f"{number}.ckpt", number, 0, world_size=1, dirpath=node.dirpath)[0]
        entries = tuple(entry_of(f"{part.name}/{basename}", data) for basename, data in files.items())
        slots = {basename: node.tier.acquire(len(data)) for basename, data in files.items()}
        for basename, data in files.items():
            slots[basename].view[: len(data)] = data
        node.tier.commit(replace(part, content=replace(part.content, files=entries)), slots)
        assert Drain(node.root, logger=LOG).run(once=True)
    assert uploads(node) == [0, SIZE]
    assert copying.client.get_object(Bucket=copying_bucket, Key="run/2.ckpt/__0_0-2.distcp")["Body"].read() == frozen


class Stopped(BaseException):
    """The process ends here."""


@pytest.mark.matrix
@pytest.mark.parametrize("answered", [False, True])
def test_a_crash_at_any_request_of_a_delta_upload_leaves_the_old_or_the_new(
    copying, copying_bucket, monkeypatch, answered
):
    """A save over its own name, so that its parts come from the object that they replace."""
    old = os.urandom(24 * MIB)
    new = os.urandom(6 * MIB) + old[6 * MIB :]
    first, second = part_of("a.ckpt", old, 1, "d"), part_of("a.ckpt", new, 2, "d")
    same = (Same(6 * MIB, 24 * MIB, "a.ckpt", 6 * MIB),)
    send, left, turn = S3Client.once, [-1], threading.Lock()

    def once(*given, **named):
        with turn:
            left[0] -= 1
            stops = left[0] == 0
        if stops and not answered:
            raise Stopped
        answer = send(*given, **named)
        if stops:
            raise Stopped
        return answer

    monkeypatch.setattr(S3Client, "once", once)
    credentials = {"aws_access_key_id": copying.access_key, "aws_secret_access_key": copying.secret_key}
    options = {"endpoint_url": copying.endpoint_url, "region": "us-east-1", "credentials": credentials}
    copied, stopped = 0, True
    for request in itertools.count(1):
        with contextlib.closing(S3Store(f"s3://{copying_bucket}/{request}", part_size=8 * MIB, **options)) as store:
            store._uploads._copy_part = 8 * MIB
            commit.commit(store, first, {"a.ckpt": memoryview(old)})
            journal, content = MemoryJournal(), {"a.ckpt": Delta(memoryview(new), same)}
            left[0] = request
            try:
                commit.commit(store, second, content, journal=journal)
                stopped = False
            except Stopped:
                left[0] = -1
                assert readable(store, "a.ckpt") in (old, new)
                commit.commit(store, second, content, journal=journal)
            left[0] = -1
            assert readable(store, "a.ckpt") == new
            copied += store.metrics.snapshot().get("bytes.copied", 0)
        if not stopped:
            break
    assert request > 8
    assert copied >= 18 * MIB
