"""``ls`` over all tiers: the tiers of each checkpoint, and its state."""

import json
import os
from dataclasses import replace

import pytest
from support.clocks import hurried
from support.documented import command
from support.draining import Node
from support.sharded import full_part, make_part
from support.silent import silent_server
from support.supporting import supported

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.model.documents import dump
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.model.manifest import Metric
from tiered_checkpoint_io.stores.directory import DirectoryStore


def listed(node, memory_dir, *, status=0):
    done = command("ls", node.dirpath, "--memory-dir", memory_dir, "--json")
    assert done.exit_code == status, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["checkpoints"]}


def test_each_checkpoint_is_one_row_that_says_where_it_is_and_what_became_of_it(node, memory_dir):
    node.save("1.ckpt", b"A" * 1000, metric=Metric("val_loss", 0.25), created=1.8e9)
    assert listed(node, memory_dir)["1.ckpt"]["state"] == "waiting", "there is nothing at the dirpath yet"
    node.alias("last.ckpt", "1.ckpt")
    node.drain()
    node.save("2.ckpt", b"B", durable=False)
    node.save("3.ckpt", b"C" * 5000)
    node.alias("last.ckpt", "3.ckpt")
    rows = listed(node, memory_dir)
    states = {name: (row["state"], *row["where"]) for name, row in rows.items()}
    assert states == {
        "3.ckpt": ("waiting", "memory"),
        "2.ckpt": ("memory_only", "memory"),
        "1.ckpt": ("durable", "memory", "durable"),
        "last.ckpt": ("durable", "memory", "durable"),
    }
    assert [name for name, row in rows.items() if row["is_latest"]] == ["3.ckpt"]
    assert rows["last.ckpt"]["alias_of"] == "1.ckpt", "the newer alias waits: see status"
    assert rows["1.ckpt"]["metric"] == {"monitor": "val_loss", "value": 0.25}
    assert rows["1.ckpt"]["created"] == "2027-01-15T08:00:00.000Z"
    assert (rows["1.ckpt"]["size_bytes"], rows["1.ckpt"]["url"]) == (1000, f"{node.dirpath}/1.ckpt")
    # One is damaged only in memory, so the durable copy counts; another has no other copy, so it is corrupt.
    for stored in node.tier.parts()[:2]:
        node.tier.quarantine(stored.folder, "a chunk differs")
    rows = listed(node, memory_dir, status=1)
    assert (rows["1.ckpt"]["state"], rows["1.ckpt"]["where"]) == ("durable", ["durable"])
    assert (rows["2.ckpt"]["state"], rows["2.ckpt"]["where"]) == ("corrupt", [])
    assert "quarantine: a chunk differs" in rows["1.ckpt"]["problem"]
    assert "quarantine: a chunk differs" in rows["2.ckpt"]["problem"]


def test_where_the_durable_tier_is_silent_memory_is_listed_after_a_count_down(memory_dir, monkeypatch):
    with hurried(silence_line_s=1.0), silent_server(monkeypatch) as endpoint, supported(durable_timeout_s=2):
        node = Node(memory_dir, "s3://bucket/run", endpoint_url=endpoint)
        node.save("1.ckpt", b"A")
        where = ("s3://bucket/run", "--memory-dir", memory_dir)
        done = command("ls", *where, "--endpoint-url", endpoint, "--json")
        assert done.exception.reason == "unavailable"
        document = json.loads(done.stdout)
        assert "has not answered for 2 s" in document["durable_error"]
        assert "s3://bucket/run has not answered for 1 s; giving up in 1 s\n" in done.stderr
        assert [(row["name"], row["state"]) for row in document["checkpoints"]] == [("1.ckpt", "waiting")]
        # Of another server nothing is listed, but said.
        other = command("ls", *where, "--endpoint-url", "http://127.0.0.1:9")
    assert (other.exception.reason, other.stdout) == ("unavailable", "")
    assert f"node memory has checkpoints of s3://bucket/run at {endpoint}, which is another server" in other.stderr


LONG = "a" * 200 + ".ckpt"


@pytest.fixture
def tier(memory_dir, tmp_path):
    """Returns a durable tier whose names sort in another way than its saves, and look like markup."""
    node = Node(memory_dir, str(tmp_path / "run[/b]"))
    node.save("z.ckpt", b"Z")
    node.save(LONG, b"A")
    node.save("c[/b].ckpt", b"C" * 100)
    node.alias("a-last.ckpt", "c[/b].ckpt")
    node.save("weights.ckpt", b"W", resumable=False)
    node.drain()
    return node


def table(done):
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert header == ["name", "step", "size", "age", "metric", "where", "kind", "state", "note"]
    return {row[0]: row[1:] for row in rows}


def test_what_a_newer_release_wrote_may_be_the_latest(tier):
    DirectoryStore(tier.dirpath).put(manifest_key("z.ckpt"), dump({"name": "z.ckpt", "version": 99}))
    rows = table(command("ls", tier.dirpath))
    assert rows["z.ckpt"][-2] == "of a newer release"
    assert "latest" not in [row[-1] for row in rows.values()]
    done = command("verify", tier.dirpath)
    assert (done.exit_code, done.stdout.count("DAMAGED")) == (1, 0)
    (line,) = [line for line in done.stdout.splitlines()[1:] if not line.startswith("intact")]
    assert line.startswith("NEWER\tdurable\tz.ckpt\t\t\tit needs a newer release: format version 99")
    assert command("verify", tier.dirpath, "tiered:latest").exception.reason == "format"


def test_a_name_or_path_that_is_not_there_is_an_error_and_no_damage(tier, tmp_path):
    missing = command("verify", tier.dirpath, "never.ckpt")
    assert isinstance(missing.exception, CheckpointNotFoundError)
    assert "no such checkpoint: never.ckpt" in str(missing.exception)
    assert missing.stdout == ""
    for arguments in (("ls",), ("verify",), ("verify", "tiered:latest")):
        wrong = command(arguments[0], str(tmp_path / "mistyped"), *arguments[1:])
        assert isinstance(wrong.exception, CheckpointNotFoundError)
        assert "mistyped" in str(wrong.exception)
    (tmp_path / "empty").mkdir()
    assert table(command("ls", str(tmp_path / "empty"))) == {}
    assert "no checkpoint to verify" in str(command("verify", str(tmp_path / "empty")).exception)
    for wrong in (("ls", tier.dirpath, "--region", "eu-west-1"), ("verify", tier.dirpath, "../x"), ("get",)):
        assert command(*wrong).exit_code == 2
    for wrong in ("tiered:last", "tiered://last", "tiered:lastest"):
        refused = command("ls", tier.dirpath, wrong)
        assert (refused.exit_code, "allowed: a name, or tiered:latest" in " ".join(refused.stderr.split())) == (2, True)


def test_what_other_nodes_upload_or_commit_is_not_called_durable(node, memory_dir):
    def sent(name, number, rank, action):
        """Notes that this node's drain has sent its part of a save of two ranks; rank 0's drain commits it."""
        op = node.part(name, number, rank)
        node.queue.finish(Outcome(op, action, name, number, "committed"))
        node.tier.mark_drained(next(each for each in node.tier.parts() if each.op_id == op))

    def rows(*where):
        printed = json.loads(command("ls", *where, "--memory-dir", memory_dir, "--json").stdout)["checkpoints"]
        return {row["name"]: (row["state"], "can't tell" in row["problem"]) for row in printed}

    os.makedirs(node.dirpath)
    part, files = make_part("kept", 2, 0)
    node.tier.replicas.commit(replace(part, dirpath=node.dirpath), files)
    sent("sent", 3, 1, "part")
    sent("ours", 4, 0, "save")
    # A restore has copied it from a node that has yet to upload it.
    part, files = full_part("brought.ckpt", 5)
    node.tier.commit(replace(part, dirpath=node.dirpath), files, drained=True, saved=False)
    unsure = dict.fromkeys(("kept", "sent", "brought.ckpt"), ("incomplete", True))
    assert rows() == {"ours": ("durable", False), **unsure}
    # With the durable tier asked, there is no such doubt.
    asked = rows(node.dirpath)
    assert (asked["sent"], asked["ours"]) == (("incomplete", False), ("memory_only", False))
