"""The command line over what is kept: prune, on a real S3 server."""

import json
import os

import pytest
from support.committing import RUN, alias, lease_of, rate, save, swept
from support.documented import command
from support.draining import names
from support.draining import objects as files
from support.fault_proxy import FaultProxy, locked
from support.sharded import named
from support.sharded import objects as all_objects
from support.supporting import build
from support.tenants import Tenant, mounted_tmpfs

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.engine.durable.lease import holder_of
from tiered_checkpoint_io.engine.durable.sweep import hold, release
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory.node import Identity
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def s3(s3_url):
    store = open_store(TieredCheckpointConfig(dirpath=s3_url))
    for number in range(1, 7):
        save(store, f"c{number}", number)
    yield store
    store.close()


def printed(done):
    """Returns a table's decision for each checkpoint, and the lines behind the table."""
    header, *lines = done.stdout.splitlines()
    assert header.split("\t") == ["name", "decision", "step", "size", "kept by"], done.output
    rows = [line.split("\t") for line in lines]
    return {row[0]: (row[1], row[4]) for row in rows if len(row) == 5}, [row[0] for row in rows if len(row) == 1]


def test_a_bucket_is_cleared_up_after_a_look_at_what_would_go(s3):
    rate(s3, "c2", "val_loss", 0.1)
    held = hold(s3, "c1", ids.save_id(RUN, 1))
    alias(s3, "release", "c3")
    s3.put("notes.txt", b"mine")
    keep = ("--keep-latest", "1", "--keep-best", "1", "--metric", "val_loss")
    before = names(s3)
    rows, lines = printed(command("prune", s3.url, *keep))
    assert names(s3) == before, "a look deletes nothing"
    assert [name for name, (decision, _) in rows.items() if decision == "goes"] == ["c5", "c4", "c1"]
    assert rows["c6"] == ("stays", "newest, latest 1")
    assert rows["c2"][1] == "best 1 by val_loss (min)"
    assert rows["c3"][1] == "target of release"
    (line,) = lines
    assert line.startswith("3 would go, ") and line.endswith("; delete with --yes")
    done = command("prune", s3.url, *keep, "--yes", "--json")
    document = json.loads(done.stdout)
    assert (document["removed"], document["dry_run"]) == (["c4", "c5"], False)
    assert names(s3) == ["c1", "c2", "c3", "c6", "release"]
    assert files(s3) == ["c1", "c2", "c3", "c6", "notes.txt"]
    assert holder_of(s3) is None, "its lease is given back"
    release(s3, held)
    assert json.loads(command("prune", s3.url, *keep, "--yes", "--json").stdout)["removed"] == ["c1"]


def test_the_best_by_a_metric_that_is_mistyped_are_not_removed(tmp_path):
    store = DirectoryStore(str(tmp_path / "run"))
    for number in range(1, 4):
        save(store, f"c{number}", number)
    keep = ("--keep-best", "1", "--metric", "val_lss", "--yes")
    done = command("prune", store.url, *keep)
    assert done.exit_code == 1 and "the metrics there are: none" in str(done.exception)
    for name, monitor in (("c1", "loss"), ("c2", "val_loss")):
        rate(store, name, monitor, 0.1)
    done = command("prune", store.url, *keep)
    assert done.exit_code == 1 and "no checkpoint has the metric val_lss" in str(done.exception)
    assert "the metrics there are: loss, val_loss" in str(done.exception)
    assert names(store) == ["c1", "c2", "c3"]


def test_while_a_run_is_there_nothing_is_removed(s3, memory_dir):
    io = build(TieredCheckpointIO, s3.url, memory_dir=memory_dir, drain="thread")
    io.save_checkpoint({"global_step": 7, "epoch": 0}, f"{s3.url}/c7")
    done = command("prune", s3.url, "--keep-latest", "1", "--yes")
    assert isinstance(done.exception, ConfigError)
    assert f"another run writes to the same dirpath: process {os.getpid()}" in str(done.exception)
    assert len(names(s3)) == 7
    io.teardown()
    assert command("prune", s3.url, "--keep-latest", "1", "--yes").exit_code == 0
    assert names(s3) == ["c7"]


def test_what_the_server_refuses_stays_and_keeps_nothing_else(s3, s3_server, monkeypatch):
    bucket, _ = ids.parse_s3_url(s3.url)
    prune = ("prune", s3.url, "--keep-latest", "1")
    with FaultProxy(s3_server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint_url)
        proxy.plan = locked(s3_server.client, bucket, "/manifests/c1.json", "/run/c2")
        done = command(*prune, "--yes")
        assert (done.exit_code, names(s3), files(s3)) == (1, ["c1", "c6"], ["c1", "c2", "c6"])
        rows, lines = printed(done)
        assert rows["c1"] == ("stays", "the server, which refuses to delete it") and rows["c2"] == ("removed", "")
        assert lines[0].startswith("removed 4, ")
        first, second = done.stderr.splitlines()
        assert first.startswith(
            "error: c1 stays, as the server refuses to delete it (a lock or a policy may hold it): S3 delete "
        )
        assert second.startswith(
            "error: files of 1 removed checkpoint are left; a later sweep tries again: S3 delete failed"
        )
        document = json.loads(command(*prune, "--yes", "--json").stdout)
        (refused,) = document["refused"]
        assert (refused["name"], refused["removed"], document["removed"]) == ("c1", False, [])
        assert "AccessDenied" in refused["error"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint_url)
    assert json.loads(command(*prune, "--yes", "--json").stdout)["removed"] == ["c1"]
    assert swept(s3) == ["c2"]
    assert {*all_objects(s3)} - {*named(s3)} == {ids.LEASE_KEY} and files(s3) == ["c6"]


@pytest.mark.parametrize("other", ["dead", "another machine's"])
def test_a_full_disk_is_cleared_up_unless_another_run_may_write_there(other, tmp_path):
    with mounted_tmpfs(tmp_path / "disk", 1 << 20) as disk:
        store = DirectoryStore(str(disk / "run"))
        for number in range(1, 4):
            save(store, f"c{number}", number)
        # No process began when the dead one says.
        machine = Identity.of_this_process().machine if other == "dead" else "elsewhere"
        store.put(ids.LEASE_KEY, lease_of("other", machine=machine).to_json())
        Tenant(disk).fills()
        done = command("prune", store.url, "--keep-latest", "1", "--yes", "--json")
        if other == "dead":
            assert done.exit_code == 0, done.exception
            assert json.loads(done.stdout)["removed"] == ["c1", "c2"]
            assert names(store) == files(store) == ["c3"]
        else:
            assert isinstance(done.exception, ConfigError)
            assert "may use this dirpath, and there is no room to ask it" in str(done.exception)
            assert names(store) == ["c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("prune",), 2, "no policy is given; say what to keep"),
        (("prune", "--keep-latest", "0"), 2, "retention.latest is 0"),
        (("prune", "--keep-best", "2"), 2, "--keep-best needs --metric"),
        (("prune", "--keep-latest", "1", "--metric", "x"), 2, "metric and mode beside best alone"),
        (("prune", "--keep-latest", "1"), 1, "there is no checkpoint at this dirpath"),
        (("prune", "--keep-latest", "1", "--yes"), 1, "there is no checkpoint at this dirpath"),
    ],
)
def test_wrong_use_is_an_error_and_writes_nothing(arguments, status, said, tmp_path):
    name, *rest = arguments
    done = command(name, str(tmp_path / "run"), *rest)
    told_by = done.stderr if status == 2 else str(done.exception)
    assert (done.exit_code, said in " ".join(told_by.split())) == (status, True), done.output
    assert not list(DirectoryStore(str(tmp_path / "run")).list(""))
