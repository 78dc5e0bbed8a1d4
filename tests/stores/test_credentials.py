"""Credentials as jobs have them: named by relative paths, and renewed while a drain lives, or for the next trainer."""

import json
import logging

import pytest
from support.clocks import quick
from support.draining import Node
from support.fault_proxy import refuse, when
from support.waiting import until

from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.s3 import MIB, S3Store

LOG = logging.getLogger("test")
#: For a process on a busy machine.
PATIENCE_S = 120


@pytest.fixture
def credentials(s3_server, tmp_path, monkeypatch):
    """Writes a shared credentials file, the only place that has any, and named relatively."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "keys/credentials")
    (tmp_path / "keys").mkdir()

    def write(key=s3_server.access_key, secret=s3_server.secret_key):
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        (tmp_path / "keys" / "credentials").write_text(text)

    return write


@pytest.fixture
def node(memory_dir, s3_url):
    return Node(memory_dir, s3_url)


def test_a_drain_that_lives_takes_up_other_keys(credentials, node):
    credentials(secret="wrong")
    # Named relatively, the file is found by the drain as by its trainer.
    save = node.save("a.ckpt", b"A")
    handle = DrainHandle(node.tier, node.config, LOG)
    handle.start()
    try:
        failed = handle.wait(save, PATIENCE_S)
        assert (failed.state, "SignatureDoesNotMatch" in failed.error) == ("failed", True)
        pid = handle.progress().pid
        credentials()
        # Something new to do has it try again what was refused.
        until(lambda: node.delete("none.ckpt") and handle.queue.outcome(save).state == "committed", poll_s=0.5)
        assert handle.progress().pid == pid
    finally:
        handle.close(timeout_s=PATIENCE_S)


class Keys:
    """Credentials from one of boto3's sources; those that are called OLD are refused by the proxy."""

    def __init__(self, source, server, folder, proxy):
        self.source, self.server, self.folder, self.proxy = source, server, folder, proxy
        self.refuse(400, "ExpiredToken")
        self.write("OLD")

    def write(self, key=None):
        key, secret = key or self.server.access_key, self.server.secret_key
        if self.source == "process":
            (self.folder / "config").write_text(f"[default]\ncredential_process = cat {self.folder}/keys\n")
            given = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret}
            (self.folder / "keys").write_text(json.dumps(given))
        else:
            text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
            (self.folder / "credentials").write_text(text)

    def refuse(self, status, code):
        """Has the proxy answer so if the keys are old."""
        old = when(lambda exchange: "Credential=OLD" in exchange.headers["Authorization"], refuse(status, code))
        self.proxy.plan = lambda *_: old


@pytest.fixture
def keys_of(s3_server, tmp_path, proxy, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return lambda source: Keys(source, s3_server, tmp_path, proxy)


@pytest.fixture
def open_store(s3_url, proxy):
    stores = []

    def open_store(**seconds):
        clock = quick(**{"credentials_again_s": 0.0, **seconds})
        stores.append(S3Store(s3_url, endpoint_url=proxy.endpoint_url, part_size=8 * MIB, clock=clock))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("source", "status", "code"), [("file", 400, "ExpiredToken"), ("process", 403, "AccessDenied")]
)
def test_other_keys_are_taken_up_where_the_old_ones_are_refused(source, status, code, keys_of, open_store, proxy):
    keys = keys_of(source)
    keys.refuse(status, code)
    store = open_store()
    with pytest.raises(StoreError, match=code):
        store.put("x", b"1")
    assert proxy.counts["put"] == 1, "there were no others"
    keys.write()
    store.put("x", b"2")
    assert proxy.counts["put"] == store.metrics.snapshot()["requests.put"] == 3
    store.put("x", b"3")
    assert proxy.counts["put"] == 4, "the new ones are kept"
