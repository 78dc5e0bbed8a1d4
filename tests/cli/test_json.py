"""What each command prints with ``--json``."""

import json
import re
from pathlib import Path

import pytest
from support.documented import check, document_of
from support.draining import Node
from support.sharded import make_part
from typer.main import get_command
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.model.manifest import Metric


@pytest.fixture
def node(memory_dir, tmp_path):
    return Node(memory_dir, str(tmp_path / "durable"))


def told(command, *arguments, status=0):
    """The one document that a command prints."""
    done = CliRunner().invoke(app, [command, *arguments, "--json"])
    assert done.exit_code == status, (done.stderr, done.exception)
    return document_of(command, done)


def test_commands_answer_programs(node, memory_dir, tmp_path):
    where = ("--memory-dir", memory_dir)
    node.save("1.ckpt", b"A" * 1000, metric=Metric("val_loss", float("nan")), writer={"torch": "2"})
    node.alias("last.ckpt", "1.ckpt")
    (namespace,) = told("status", *where)["namespaces"]
    assert [(each["action"], each["target"]) for each in namespace["waiting"]] == [("save", None), ("alias", "1.ckpt")]
    assert [(each["state"], each["tier"], each["is_latest"]) for each in namespace["parts"]] == [
        ("waiting", "memory", True)
    ]
    node.drain()
    (namespace,) = told("status", *where)["namespaces"]
    assert [(each["name"], each["outcome"]) for each in namespace["outcomes"]] == [
        ("1.ckpt", "committed"),
        ("last.ckpt", "committed"),
    ]
    node.save("1.ckpt", b"BB", durable=False)
    (first, second, alias) = told("ls", node.dirpath, *where)["checkpoints"]
    assert (first["state"], second["state"], alias["alias_of"]) == ("memory_only", "durable", "1.ckpt")
    assert second["metric"] == {"monitor": "val_loss", "value": None}
    assert len(told("ls", *where)["checkpoints"]) == 2
    later, earlier = told("ls", node.dirpath, "1.ckpt", *where)["checkpoints"]
    assert (later["manifest_key"], earlier["manifest_key"]) == (None, ".tiered/manifests/1.ckpt.json")
    assert (earlier["aliases"], earlier["writer"]) == (["last.ckpt"], {"torch": "2"})
    assert earlier["files"] == [{"path": "1.ckpt", "size_bytes": 1000}]
    (namespace,) = told("status", *where)["namespaces"]
    assert [*earlier["held_parts"], *later["held_parts"]] == namespace["parts"]
    shown = told("clean", *where, status=1)
    assert (shown["dry_run"], shown["checkpoints"][1]["size_bytes"], len(shown["warnings"])) == (True, 2, 1)
    assert told("clean", *where, "--yes")["checkpoints"] == shown["checkpoints"]
    assert told("clean", *where)["checkpoints"] == []
    assert told("status", *where) == {"version": 1, "command": "status", "namespaces": []}
    # What is damaged has a row, too.
    (tmp_path / "durable/.tiered/manifests/1.ckpt.json").write_text("{")
    assert [each["state"] for each in told("ls", node.dirpath, *where, status=1)["checkpoints"]] == [
        "durable",
        "corrupt",
    ]


def test_a_damaged_replica_is_told_apart(node, memory_dir):
    part, files = make_part("step_7", 7, 3, dirpath=node.dirpath)
    node.tier.replicas.commit(part, files)
    (kept,) = node.tier.replicas.parts()
    (kept.folder / "part.json").write_text("{")
    (namespace,) = told("status", "--memory-dir", memory_dir)["namespaces"]
    assert [(each["tier"], each["folder"]) for each in namespace["damaged"]] == [("replicas", str(kept.folder))]
    shown = CliRunner().invoke(app, ["status", "--memory-dir", memory_dir]).stdout
    assert f"{kept.folder}\t" in shown.partition("Copies kept for other nodes:")[2]


def test_each_line_of_a_watch_is_a_document(node, memory_dir):
    where = ("--memory-dir", memory_dir)
    node.save("1.ckpt", b"A")
    node.drain()
    options = ("--exec", "echo not on stdout; exit 3", "--after", "", "--idle-timeout", "0", "--json")
    done = CliRunner().invoke(app, ["watch", node.dirpath, *where, *options])
    listed, ran = [check("watch", json.loads(line)) for line in done.stdout.splitlines()]
    assert (listed["event"], listed["checkpoint"]["name"]) == ("listed", "1.ckpt")
    assert (ran["event"], ran["exit_status"], done.exit_code) == ("ran", 3, 1)


def test_every_command_with_a_document_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs/command-line.md").read_text()
    for name, command in get_command(app).commands.items():
        row = re.search(rf"^\| `.*\b{name}`.* \| `", text, re.MULTILINE)
        assert any("--json" in each.opts for each in command.params) == bool(row), name
