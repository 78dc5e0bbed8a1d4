"""What ``ls`` and ``status`` say of checkpoints that other nodes upload, or commit."""

import json
from dataclasses import replace

import pytest
from support.draining import Node
from support.sharded import full_part, make_part
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.drain.operations import Outcome

UNSURE = "this node can't tell whether it is durable; the durable tier can, where DIRPATH is given and it answers"


def command(*arguments):
    return CliRunner().invoke(app, arguments)


def rows_of(done):
    return {row["name"]: row for row in json.loads(done.stdout)["checkpoints"]}


def state_of(done):
    """The fourth column of the only part that ``ls`` shows of a checkpoint."""
    part = done.stdout.partition("Parts on this node:")[2].partition("Files:")[0]
    (row,) = [line.split("\t") for line in part.strip().splitlines()[1:]]
    return row[3]


def sent(node, name, number, rank, action):
    """This node's drain has sent its part of a save of two ranks; that of rank 0 commits it."""
    op = node.part(name, number, rank)
    node.queue.finish(Outcome(op, action, name, number, "committed"))
    (stored,) = [each for each in node.tier.parts() if each.op_id == op]
    node.tier.mark_drained(stored)


@pytest.fixture
def node(memory_dir, tmp_path):
    (tmp_path / "run").mkdir()
    return Node(memory_dir, str(tmp_path / "run"))


def test_what_other_nodes_upload_or_commit_is_not_called_durable(node, memory_dir):
    where = ("--memory-dir", memory_dir)
    for part, files in (full_part("full.ckpt", 1), make_part("kept", 2, 0)):
        node.tier.replicas.commit(replace(part, dirpath=node.dirpath), files)
    # Its owner was to commit it: this node has sent all that it could.
    sent(node, "sent", 3, 1, "part")
    sent(node, "ours", 4, 0, "save")
    # A restore has brought it from a node that has yet to upload it.
    part, files = full_part("brought.ckpt", 5)
    brought = replace(part, dirpath=node.dirpath)
    node.tier.commit(brought, files, drained=True, saved=False)
    rows = rows_of(command("ls", *where, "--json"))
    unsure = ("incomplete", UNSURE)
    assert {name: (row["state"], row["problem"]) for name, row in rows.items()} == {
        "full.ckpt": unsure,
        "kept": unsure,
        "sent": unsure,
        "ours": ("durable", ""),
        "brought.ckpt": unsure,
    }
    assert command("ls", *where).exit_code == 0, "nothing is damaged"
    # With the durable tier asked, there is no such doubt.
    assert {row["problem"] for row in rows_of(command("ls", node.dirpath, *where, "--json")).values()} == {""}
    shown = {name: state_of(command("ls", node.dirpath, name, *where)) for name in rows}
    assert shown == {
        "full.ckpt": "not known here",
        "kept": "not known here",
        "sent": "part sent",
        "ours": "durable",
        "brought.ckpt": "not known here",
    }
    table = command("status", *where).stdout.partition("Copies kept")[0]
    states = {line.split("\t")[0]: line.split("\t")[4] for line in table.splitlines() if line.count("\t") > 4}
    assert (states["sent"], states["ours"], states["brought.ckpt"]) == ("part sent", "durable", "not known here")
