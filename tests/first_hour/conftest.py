"""A stranger's machine: a bucket on a real S3 server, credentials in the environment, an empty folder."""

import os

import pytest
from support.first_hour import BUCKET, Story
from support.rclone_server import RcloneServer


@pytest.fixture(scope="session")
def _own_server():
    # One for each process of the test run: all stories have the same bucket.
    with RcloneServer() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def story(_own_server, tmp_path, memory_dir, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in _own_server.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "160")
    made = Story(tmp_path, memory_dir, _own_server.endpoint_url)
    yield made
    made.close()
    _own_server.empty(BUCKET)
