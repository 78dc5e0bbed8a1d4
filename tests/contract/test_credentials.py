"""Credentials as jobs have them: named by relative paths, and renewed while a drain or a trainer lives."""

import logging
import os

import pytest
from support.draining import Node

from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.environment import elsewhere

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


@pytest.fixture
def handle(node):
    handle = DrainHandle(node.tier, node.config, LOG)
    yield handle
    handle.close(timeout_s=PATIENCE_S)


def test_a_file_named_relatively_is_found_by_the_drain_as_by_its_trainer(credentials, node, handle):
    credentials()
    save = node.save("a.ckpt", b"A")
    handle.start()
    outcome = handle.wait(save, PATIENCE_S)
    assert outcome.state == "committed", outcome.error
    assert os.environ["AWS_SHARED_CREDENTIALS_FILE"] == "keys/credentials", "the trainer's own is as it was"


def test_what_a_process_elsewhere_is_given_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    given = {
        "AWS_CONFIG_FILE": "config",
        "AWS_CA_BUNDLE": "/etc/ca.pem",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "",
        "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
        "GOOGLE_APPLICATION_CREDENTIALS": "$PLACE/key.json",
        "SSL_CERT_FILE": "$ROOT/key.json",
        "PLACE": "relative",
        "ROOT": "/root",
        "PYTHONPATH": os.pathsep.join(["src", "/lib", "", "../shared"]),
        "AWS_PROFILE": "config",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    changed = {
        "AWS_CONFIG_FILE": f"{here}/config",
        "GOOGLE_APPLICATION_CREDENTIALS": f"{here}/$PLACE/key.json",
        "PYTHONPATH": os.pathsep.join([f"{here}/src", "/lib", here, f"{here}/../shared"]),
    }
    assert {name: value for name, value in elsewhere().items() if name in given} == {**given, **changed}
