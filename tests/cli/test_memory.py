"""The command line over node memory, as a person at a node uses it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.documented import check, document_of, verified
from support.draining import Node, names, where_of
from support.sharded import make_part
from typer.main import get_command
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.worker import TRAINERS_FILE
from tiered_checkpoint_io.engine.leasing.namespace_lock import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.model.manifest import Metric
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def node(memory_dir, tmp_path):
    return Node(memory_dir, str(tmp_path / "durable"))


def command(*arguments):
    return CliRunner().invoke(app, arguments)


def test_drain_look_verify_and_clean_up(node, memory_dir, tmp_path):
    where = ("--memory-dir", memory_dir)
    node.save("epoch=0-step=1.ckpt", b"A" * 100_000)
    node.alias("last.ckpt", "epoch=0-step=1.ckpt")
    assert "waits for the durable tier" in command("status", *where).stdout
    told = command("clean", *where)
    assert (
        told.exit_code,
        "1 operation not yet durable" in told.stderr or "2 operations not yet durable" in told.stderr,
    ) == (1, True)
    node.drain()
    shown = command("status", *where).stdout
    assert "committed" in shown
    assert "waits for" not in shown
    whole = command("verify", node.dirpath)
    assert (whole.exit_code, whole.stdout.count("intact")) == (0, 2)
    path = tmp_path / "durable" / "epoch=0-step=1.ckpt"
    for damaged in (b"A" * 99_999 + b"B", b"A" * 99_999, b"A" * 100_001):
        path.write_bytes(damaged)
        found = command("verify", node.dirpath, "epoch=0-step=1.ckpt")
        assert (found.exit_code, found.stdout.count("DAMAGED")) == (1, 1)
    # As a callback's best_model_path has it.
    assert command("verify", node.dirpath, f"{node.dirpath}/last.ckpt").stdout.startswith(
        verified() + "DAMAGED\tdurable\tlast.ckpt\t"
    )

    for held in (TRAINERS_FILE, JOB_FILE):
        trainer = try_lock(node.root / held, shared=True)
        assert "a trainer or drain uses it" in command("clean", *where).stderr
        refused = command("clean", *where, "--yes")
        assert isinstance(refused.exception, ConfigError)
        assert "a trainer or drain uses it" in str(refused.exception)
        release(trainer)
    shown = command("clean", *where)
    assert (shown.exit_code, "would go; delete with --yes" in shown.stdout, len(node.tier.parts())) == (0, True, 1)
    assert command("clean", *where, "--yes").exit_code == 0
    assert os.listdir(memory_dir) == []
    assert names(DirectoryStore(node.dirpath)) == ["epoch=0-step=1.ckpt", "last.ckpt"]


def test_a_second_drain_stands_by_and_takes_over_from_one_that_dies(node):
    """Two sidecars over one tmpfs."""

    def start():
        ours = [sys.executable, "-m", "tiered_checkpoint_io", "flush", "--stay", *node.where]
        return subprocess.Popen(ours, stderr=subprocess.PIPE, text=True)

    def wait_for(said, process):
        assert any(said in line for line in process.stderr), "it ended without a word of it"

    first = start()
    second = None
    try:
        op = node.save("a.ckpt", b"A")
        until(lambda: node.states() == {op: "committed"})
        second = start()
        wait_for("standing by", second)
        # Time to look again, and to say it again.
        time.sleep(1.5)
        first.send_signal(signal.SIGKILL)
        first.wait()
        later = node.save("b.ckpt", b"B")
        until(lambda: node.states() == {op: "committed", later: "committed"})
        second.send_signal(signal.SIGTERM)
        told = second.communicate(timeout=30)[1]
        assert (second.returncode, told.count("standing by")) == (0, 0), "said once"
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
            process.stderr.close()


def until(is_it, deadline_s=30):
    end = time.monotonic() + deadline_s
    while not is_it():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_status_tells_what_is_safe_with_peers_and_what_is_kept_for_them(node, memory_dir):
    node.save("safe.ckpt", b"A" * 1000)
    node.save("alone.ckpt", b"B" * 1000)
    safe, _ = node.tier.parts()
    node.tier.mark_replicated(safe)
    part, files = make_part("step_7", 7, 3, dirpath=node.dirpath)
    node.tier.replicas.commit(part, files)
    own, _, copies = command("status", "--memory-dir", memory_dir).stdout.partition("Copies kept for other nodes")
    alone, safe = rows(own, ".ckpt")
    (kept,) = rows(copies, "step_")
    # Name, step, rank, size, state, on peers, note, dirpath.
    assert (safe[0], safe[5], safe[6]) == ("safe.ckpt", "yes", "")
    assert (alone[0], alone[5], alone[6]) == ("alone.ckpt", "no", "latest")
    assert (*kept[:3], kept[5], kept[7]) == ("step_7", "7", "3", "no", node.dirpath)


def rows(table, name):
    """The rows of a table whose first column holds ``name``, by columns."""
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
    """What root made there that user's trainer could not open: no checkpoint of it would be uploaded any more."""
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


# ----------------------------------------------------------------------------------- all namespaces
def test_status_shows_all_namespaces_their_durable_tiers_and_what_is_pending(memory_dir, tmp_path):
    first = Node(memory_dir, str(tmp_path / "one"), namespace="one")
    second = Node(memory_dir, str(tmp_path / "two"), namespace="two")
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
    assert (weights[0], weights[6], resumable[0], resumable[6]) == ("c[/b].ckpt", "not resumable", "a.ckpt", "latest")
    assert f"alias\tlast.ckpt\ta.ckpt\t{first.dirpath}" in one
    assert "3 pending" in one
    assert "memory only" in two
    assert "0 pending" in two
    assert "b.ckpt" not in command("status", "--memory-dir", memory_dir, "--namespace", "one").stdout


def test_status_of_no_namespace_is_none_and_of_no_folder_an_error(memory_dir, tmp_path):
    nothing = command("status", "--memory-dir", memory_dir)
    assert nothing.exit_code == 0
    assert "no namespace" in nothing.stderr
    assert isinstance(command("status", "--memory-dir", str(tmp_path / "mistyped")).exception, ConfigError)
    assert command("status", "--memory-dir", memory_dir, "--namespace", "a/b").exit_code == 2


@pytest.fixture
def drained(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "run"))
    node.save("a.ckpt", b"A")
    node.drain()
    return node


@pytest.mark.parametrize("tier", [[], ["--tier", "memory"]])
def test_a_memory_dir_that_is_mistyped_is_not_passed_by(drained, memory_dir, tier):
    """The durable tier alone would be intact, and node memory taken for it."""
    wrong = command("verify", drained.dirpath, "--memory-dir", f"{memory_dir}/typo", *tier)
    assert isinstance(wrong.exception, ConfigError)
    assert f"there is no folder {memory_dir}/typo" in str(wrong.exception)
    right = command("verify", drained.dirpath, "--memory-dir", memory_dir)
    assert (right.exit_code, right.stdout.count("memory\ta.ckpt")) == (0, 1)


def test_a_machine_without_node_memory_verifies_the_durable_tier(drained, monkeypatch, tmp_path):
    is_dir = os.path.isdir
    monkeypatch.setattr("os.path.isdir", lambda path: path != "/dev/shm" and is_dir(path))
    done = command("verify", drained.dirpath)
    assert (done.exit_code, done.stdout) == (0, verified(("intact", "durable", "a.ckpt")))


def test_a_memory_dir_below_the_home_is_found(drained, memory_dir, monkeypatch):
    home, _, last = memory_dir.rpartition("/")
    monkeypatch.setenv("HOME", home)
    for name in ("status", "ls", "verify", "clean"):
        done = command(name, f"--memory-dir=~/{last}")
        assert (done.exit_code, "a.ckpt" in done.stdout) == (0, True), (name, done.exception)
    assert command("ls", "--memory-dir=").exit_code == 2


def test_a_checkpoint_is_flushed_by_its_url_and_as_the_latest(drained):
    where = drained.where
    drained.save("x/b.ckpt", b"B", durable=False)
    drained.save("weights.ckpt", b"C", durable=False, resumable=False)
    for name in ("other.ckpt", f"{drained.dirpath}/other.ckpt", "/elsewhere/x/b.ckpt", "tiered:last"):
        wrong = command("flush", name, *where)
        assert isinstance(wrong.exception, CheckpointNotFoundError)
        assert f"no such checkpoint: {name}" in str(wrong.exception)
    flushed = command("flush", "tiered:latest", *where)
    assert (flushed.exit_code, "\nx/b.ckpt\t2\t0.00 KiB\tdurable\t" in flushed.stdout) == (0, True), flushed.exception
    flushed = command("flush", f"{drained.dirpath}/weights.ckpt", *where)
    assert (flushed.exit_code, "\nweights.ckpt\t3\t0.00 KiB\tdurable\t" in flushed.stdout) == (0, True), (
        flushed.exception
    )


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
