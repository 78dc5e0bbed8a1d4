"""Places for metrics that another process has: two jobs of a node, and a trainer that is started again at once."""

import contextlib
import os
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import get_logger
from tiered_checkpoint_io.metrics import exports
from tiered_checkpoint_io.metrics.collect import Source
from tiered_checkpoint_io.metrics.exports import Exports, targets_of_trainer

LOG = get_logger("metrics")
WITHOUT = "training continues without"


@pytest.fixture
def started(dead, monkeypatch):
    """Begins to export to one target, as a trainer does."""
    monkeypatch.setattr(exports, "_AGAIN_S", 0.05)
    (root,) = Path(dead.memory_dir).glob("tiered-*/*")
    with contextlib.ExitStack() as held:

        def start(text):
            (target,) = targets_of_trainer(text)
            running = Exports()
            held.callback(running.close)
            running.start_patiently(target, Source(lambda: [root]), LOG)
            return running

        yield start


def until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(port):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as told:
        return b"tiered_checkpoint_step" in told.read()
    return False


def test_of_two_jobs_one_has_the_textfile(started, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(exports, "_PATIENCE_S", 0.2)
    told = tmp_path / "m.prom"
    first, second = started(f"textfile={told}"), started(f"textfile={told}")
    until(told.exists)
    until(lambda: WITHOUT in caplog.text)
    second.close()
    assert caplog.text.count(f"metrics can't be written to {told}: another process exports to it") == 1
    assert told.exists(), "it is the first job's"
    first.close()
    assert [*tmp_path.glob("*m.prom*"), *tmp_path.glob(".m.prom*")] == []


def test_a_textfile_that_becomes_free_is_taken_over(started, tmp_path, caplog):
    told = tmp_path / "m.prom"
    first = started(f"textfile={told}")
    until(told.exists)
    started(f"textfile={told}")
    first.close()
    until(told.exists)
    assert WITHOUT not in caplog.text


def test_a_command_says_at_once_that_a_file_is_taken_or_has_no_folder(started, tmp_path):
    started(f"textfile={tmp_path / 'm.prom'}")
    for path, why in ((tmp_path / "m.prom", "another process"), (tmp_path / "none" / "m.prom", "No such file")):
        with pytest.raises(ConfigError, match=f"can't be written to {path}: {why}"):
            Exports().start(*targets_of_trainer(f"textfile={path}"), Source(list), LOG)


def test_a_port_that_becomes_free_is_served(started, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started(f"prometheus={port}")
        time.sleep(0.2)
    until(lambda: answers(port))
    assert WITHOUT not in caplog.text


def test_a_training_that_ends_before_says_so_once(started, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started(f"prometheus={taken.getsockname()[1]}").close()
    assert caplog.text.count("nothing was exported") == 1
    assert WITHOUT not in caplog.text


def test_a_forked_process_does_not_keep_the_port(started):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = started(f"prometheus={port}")
    assert answers(port)
    ends, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    try:
        serving.close()
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        os.close(end)
        os.waitpid(child, 0)
