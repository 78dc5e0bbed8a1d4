"""Commands that move checkpoints, where something is wrong, or someone ends them: one line, and nothing half done."""

import signal
import time

import pytest
from support.draining import Node
from support.fault_proxy import FaultProxy, late, where
from support.processes import end, start
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.durable.manifests import names_of
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.stores import open_store

#: Of several chunks.
LARGE = b"L" * (20 << 20)
WAIT_S = 60.0


def interrupted(proxy, operation, *arguments, behind=0, by=signal.SIGINT):
    """Runs a command until it has begun to move bytes, ``behind`` other requests, and ends it, by default as Ctrl-C."""
    before, deadline = proxy.counts[operation], time.monotonic() + WAIT_S
    process = start(*arguments)
    while proxy.counts[operation] <= before + behind:
        assert time.monotonic() < deadline
        assert process.poll() is None, end(process)
        time.sleep(0.02)
    process.send_signal(by)
    status, out, err = end(process)
    # On a slow machine there is a line of progress.
    return status, out, [line for line in err.splitlines() if "iB/s" not in line]


@pytest.fixture
def server(s3_server, s3_bucket, monkeypatch):
    """A server that is slow with a checkpoint's bytes, and the URL of a run there."""
    slow = where(late(1.0), key="large.ckpt")
    with FaultProxy(s3_server.endpoint_url, lambda *asked: slow(*asked) if proxy.is_slow else None) as proxy:
        proxy.plan.takes_path, proxy.is_slow = True, False
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint_url)
        proxy.url = f"s3://{s3_bucket}/run"
        yield proxy


def test_ctrl_c_during_a_get_leaves_nothing_in_memory(server, memory_dir):
    node = Node(memory_dir, server.url)
    node.save("large.ckpt", LARGE)
    node.drain()
    server.is_slow = True
    fetched = ("get", server.url, "--memory-dir", memory_dir, "--namespace", "other")
    assert interrupted(server, "get", *fetched) == (130, "", ["interrupted"])
    other = node.root.with_name("other")
    assert MemoryTier(other).parts() == []
    assert list((other / "slots").iterdir()) == []


@pytest.mark.matrix
def test_ctrl_c_amid_a_flush_leaves_the_upload_to_the_drain(server, memory_dir):
    node = Node(memory_dir, server.url)
    node.save("large.ckpt", LARGE, durable=False)
    server.is_slow = True
    assert interrupted(server, "put", "flush", *node.where) == (130, "", ["interrupted"])
    server.is_slow = False
    assert CliRunner().invoke(app, ["flush", *node.where]).exit_code == 0
    store = open_store(node.config)
    assert names_of(store) == {"large.ckpt"}
    store.close()


@pytest.mark.matrix
def test_a_bucket_that_is_not_there_is_one_line(s3_server, memory_dir, tmp_path):
    node = Node(memory_dir, "s3://no-such-bucket/run")
    node.save("a.ckpt", b"A", durable=False)
    for arguments in (
        ("verify", node.dirpath, "--tier", "durable"),
        ("get", node.dirpath, "--memory-dir", memory_dir),
        ("flush", *node.where),
    ):
        status, _, err = end(start(*arguments))
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert status == 1
        assert "no-such-bucket" in line
    assert [each.pending for each in node.tier.parts()] == [True]
