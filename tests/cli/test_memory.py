"""The command line over node memory, as a person at a node uses it."""

import json
import os
import re
from pathlib import Path

import pytest
from support.documented import check, command, document_of, verified
from support.draining import Node, where_of
from typer.main import get_command

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.model.manifest import Metric


def rows(table, name):
    """Returns the rows of a table whose first column holds ``name``, by columns."""
    return [cells for line in table.splitlines() if name in (cells := line.split("\t"))[0]]


@pytest.mark.parametrize("what", ["status", "flush", "clean"])
def test_a_root_that_is_no_memory_tier_is_left_as_it_is(what, tmp_path):
    precious = namespace_root(str(tmp_path), "precious")
    precious.mkdir(parents=True)
    (precious / "file").touch()
    for root in (precious, *([precious.with_name("none")] if what != "clean" else [])):
        refused = command(what, *where_of(root), *(["--yes"] if what == "clean" else []))
        assert isinstance(refused.exception, ConfigError)
        assert "no memory tier" in str(refused.exception)
    assert os.listdir(precious) == ["file"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can enter another user's folder")
@pytest.mark.parametrize("what", [("flush", "--timeout", "5"), ("flush", "--stay"), ("clean", "--yes")])
def test_root_leaves_the_memory_of_another_user_as_it_is(what, node):
    """A trainer of that user could not open a folder made by root: none of its checkpoints would be uploaded."""
    node.save("a.ckpt", b"A", durable=False)
    everything = [node.root.parent, *node.root.parent.rglob("*")]
    for path in everything:
        os.chown(path, 12345, -1)
    refused = command(*what, *node.where)
    assert isinstance(refused.exception, ConfigError)
    assert "belongs to user 12345, and this command runs as user 0" in str(refused.exception)
    assert "sudo -u '#12345'" in str(refused.exception)
    assert {path.stat().st_uid for path in node.root.rglob("*")} == {12345}
    assert len([*node.root.parent.rglob("*")]) + 1 == len(everything)
    assert command("status", *node.where).exit_code == 0


def test_all_namespaces_are_shown_with_their_durable_tiers_and_what_is_pending(memory_dir, tmp_path):
    nothing = command("status", "--memory-dir", memory_dir)
    assert (nothing.exit_code, "no namespace" in nothing.stderr) == (0, True)
    first = Node(memory_dir, str(tmp_path / "one"), namespace="one")
    second = Node(memory_dir, "s3://bucket/run", namespace="two", endpoint_url="http://127.0.0.1:9")
    first.save("a.ckpt", b"A")
    first.alias("last.ckpt", "a.ckpt")
    # Later, but nothing to resume from.
    first.save("c[/b].ckpt", b"W", resumable=False)
    second.save("b.ckpt", b"B", durable=False)
    shown = command("status", "--memory-dir", memory_dir).stdout
    one, _, two = shown.partition("namespace: two")
    assert f"dirpath: {first.dirpath}" in one
    assert f"dirpath: {second.dirpath}" in two
    weights, resumable, *_ = rows(one, ".ckpt")
    assert (weights[0], weights[6], resumable[0], resumable[8]) == (
        "c[/b].ckpt",
        "full, not resumable",
        "a.ckpt",
        "latest",
    )
    assert f"alias\tlast.ckpt\ta.ckpt\t{first.dirpath}" in one
    assert "3 pending" in one
    assert "memory only" in two
    assert "0 pending" in two
    assert "b.ckpt" not in command("status", "--memory-dir", memory_dir, "--namespace", "one").stdout
    assert command("status", "--memory-dir", memory_dir, "--namespace", "a/b").exit_code == 2
    # No server is asked.
    listed = rows(command("ls", "--memory-dir", memory_dir).stdout, ".ckpt")
    assert sorted((name, *more[-3:]) for name, *more in listed) == [
        ("a.ckpt", "waiting", "latest", first.dirpath),
        ("b.ckpt", "memory only", "latest", second.dirpath),
        ("c[/b].ckpt", "waiting", "", first.dirpath),
    ]


@pytest.fixture
def drained(node):
    node.save("a.ckpt", b"A")
    node.drain()
    return node


@pytest.mark.parametrize("what", ["status", "ls", "verify {dirpath}", "verify {dirpath} --tier memory"])
def test_a_memory_dir_that_is_mistyped_is_not_passed_by(drained, memory_dir, what):
    """Only the durable tier would be verified, and node memory would seem intact."""
    line = what.format(dirpath=drained.dirpath).split()
    wrong = command(*line, "--memory-dir", f"{memory_dir}/typo")
    assert isinstance(wrong.exception, ConfigError)
    assert f"there is no folder {memory_dir}/typo" in str(wrong.exception)
    right = command(*line, "--memory-dir", memory_dir)
    assert (right.exit_code, "a.ckpt" in right.stdout) == (0, True)


def test_a_machine_without_node_memory_verifies_the_durable_tier(drained, monkeypatch, tmp_path):
    is_dir = os.path.isdir
    monkeypatch.setattr("os.path.isdir", lambda path: path != "/dev/shm" and is_dir(path))
    done = command("verify", drained.dirpath)
    assert (done.exit_code, done.stdout) == (0, verified(("intact", "durable", "a.ckpt")))


def printed(name, *arguments, status=0):
    """Returns the one document that a command prints."""
    done = command(name, *arguments, "--json")
    assert done.exit_code == status, (done.stderr, done.exception)
    return document_of(name, done)


def test_commands_answer_programs(node, memory_dir, tmp_path):
    where = ("--memory-dir", memory_dir)
    node.save("1.ckpt", b"A" * 1000, metric=Metric("val_loss", float("nan")), writer={"torch": "2"})
    node.alias("last.ckpt", "1.ckpt")
    (namespace,) = printed("status", *where)["namespaces"]
    assert [(each["action"], each["target"]) for each in namespace["waiting"]] == [("save", ""), ("alias", "1.ckpt")]
    assert [(each["state"], each["tier"]) for each in namespace["parts"]] == [("waiting", "memory")]
    node.drain()
    (namespace,) = printed("status", *where)["namespaces"]
    assert [(each["name"], each["state"]) for each in namespace["outcomes"]] == [
        ("1.ckpt", "committed"),
        ("last.ckpt", "committed"),
    ]
    node.save("1.ckpt", b"BB", durable=False)
    (first, second, alias) = printed("ls", node.dirpath, *where)["checkpoints"]
    assert (first["state"], second["state"], alias["alias_of"]) == ("memory_only", "durable", "1.ckpt")
    assert second["metric"] == {"monitor": "val_loss", "value": None}
    assert len(printed("ls", *where)["checkpoints"]) == 2
    later, earlier = printed("ls", node.dirpath, "1.ckpt", *where)["checkpoints"]
    assert (later["manifest_key"], earlier["manifest_key"]) == (None, ".tiered/manifests/1.ckpt.json")
    assert (earlier["aliases"], earlier["writer"]) == (["last.ckpt"], {"torch": "2"})
    assert earlier["files"] == [{"path": "1.ckpt", "size_bytes": 1000}]
    (namespace,) = printed("status", *where)["namespaces"]
    assert [*earlier["held_parts"], *later["held_parts"]] == namespace["parts"]
    shown = printed("clean", *where, status=1)
    assert (shown["dry_run"], shown["checkpoints"][0]["size_bytes"], len(shown["warnings"])) == (True, 2, 1)
    assert printed("clean", *where, "--yes")["checkpoints"] == shown["checkpoints"]
    assert printed("clean", *where)["checkpoints"] == []
    assert printed("status", *where) == {"version": 1, "command": "status", "namespaces": []}
    # A damaged part has a row, too.
    (tmp_path / "run/.tiered/manifests/1.ckpt.json").write_text("{")
    assert [each["state"] for each in printed("ls", node.dirpath, *where, status=1)["checkpoints"]] == [
        "durable",
        "corrupt",
    ]


def test_each_line_of_a_watch_is_a_document(node):
    node.save("1.ckpt", b"A")
    node.drain()
    options = ("--exec", "echo not on stdout; exit 3", "--after", "", "--idle-timeout", "0", "--json")
    done = command("watch", node.dirpath, *options)
    new, ran = [check("watch", json.loads(line)) for line in done.stdout.splitlines()]
    assert (new["event"], new["checkpoint"]["name"]) == ("new", "1.ckpt")
    assert (ran["event"], ran["exit_status"], done.exit_code) == ("ran", 3, 1)


def test_every_command_with_a_document_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs/command-line.md").read_text()
    for name, known in get_command(app).commands.items():
        row = re.search(rf"^\| `.*\b{name}`.* \| `", text, re.MULTILINE)
        assert any("--json" in each.opts for each in known.params) == bool(row), name
