"""Fixtures shared by all tests: a real S3 server, fresh buckets, private folders on tmpfs."""

import os
import secrets
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

from tiered_checkpoint_io.testing.servers import RcloneServer

S3_FIXTURES = {"s3_server", "s3_url"}


def pytest_collection_modifyitems(items):
    for item in items:
        if S3_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("s3")


class OutsideServer:
    """An S3 server that someone else runs; told by TIERED_TEST_S3_ENDPOINT, _KEY and _SECRET."""

    endpoint_url = os.environ.get("TIERED_TEST_S3_ENDPOINT", "")

    def env(self):
        return {
            "AWS_ACCESS_KEY_ID": os.environ["TIERED_TEST_S3_KEY"],
            "AWS_SECRET_ACCESS_KEY": os.environ["TIERED_TEST_S3_SECRET"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name):
        import boto3

        env = self.env()
        boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        ).create_bucket(Bucket=name)
        return f"s3://{name}"


@pytest.fixture(scope="session")
def _server():
    if OutsideServer.endpoint_url:
        yield OutsideServer()
        return
    folder = tempfile.mkdtemp(prefix="tiered-s3-", dir="/dev/shm")
    try:
        with RcloneServer(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def s3_server(_server, monkeypatch):
    for key, value in _server.env().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    return _server


@pytest.fixture
def s3_url(s3_server):
    return s3_server.make_bucket(f"test-{secrets.token_hex(6)}") + "/run"


@pytest.fixture
def memory_dir():
    folder = tempfile.mkdtemp(prefix="tiered-test-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_child_is_left():
    yield
    warnings.resetwarnings()
    left = [
        f"{pid}: {line}"
        for pid in children(os.getpid())
        if "tiered_checkpoint_io" in (line := command_line(pid)) and " drain " in line
    ]
    assert not left, f"drains left behind: {left}"


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
