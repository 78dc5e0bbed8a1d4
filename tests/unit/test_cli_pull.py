"""The command that brings a checkpoint from the durable tier to this node's memory, or to a folder."""

import json
import os
from dataclasses import replace

import pytest
import torch
from support import committing
from support.documented import document_of
from support.draining import Node
from support.sharded import readable
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.cli import app, pulling
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ExportError,
    MemoryFullError,
    StoreChangedError,
)
from tiered_checkpoint_io.memory import tier as memory
from tiered_checkpoint_io.memory.tier import MemoryTier, namespace_root
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.stores.directory import DirectoryStore


def command(*arguments):
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def run(memory_dir, tmp_path):
    """A run's dirpath, with a full checkpoint by a trainer's IO; its node is lost."""
    dirpath = str(tmp_path / "run")
    io = TieredCheckpointIO(dirpath=dirpath, memory_dir=memory_dir, namespace="before", drain="thread")
    io.save_checkpoint({"global_step": 5, "weights": torch.arange(1000.0)}, f"{dirpath}/step=5.ckpt")
    io.teardown()
    assert command("clean", "--memory-dir", memory_dir, "--namespace", "before").exit_code == 0
    return dirpath


def test_a_restart_reads_from_memory_what_was_pulled(run, memory_dir):
    done = command("pull", run, "--memory-dir", memory_dir, "--json")
    document = document_of("pull", done)
    assert (done.exit_code, document["name"], document["step"], document["ranks"]) == (0, "step=5.ckpt", 5, [0])
    io = TieredCheckpointIO(dirpath=run, memory_dir=memory_dir)
    state = io.load_checkpoint("tiered:latest")
    assert io.checkpointer.restored.tier == "memory"
    assert torch.equal(state["weights"], torch.arange(1000.0))
    io.teardown()
    # Again: nothing is fetched; a damaged copy is taken away first.
    again = command("pull", run, "--memory-dir", memory_dir)
    assert (again.exit_code, "already, intact" in again.stdout) == (0, True)
    (held,) = (namespace_root(memory_dir, document["namespace"])).glob("saves/*/*/step=5.ckpt")
    held.write_bytes(b"?" * held.stat().st_size)
    assert "pulled step=5.ckpt" in command("pull", run, "step=5.ckpt", "--memory-dir", memory_dir).stdout
    assert command("verify", run, "--memory-dir", memory_dir).exit_code == 0


def test_a_pull_beside_another_finds_what_that_has_brought(run, memory_dir, monkeypatch):
    """As where each task of a node runs it."""
    pull, fetch, others = ("pull", run, "--memory-dir", memory_dir), pulling.fetch_chunk, []

    def late(*arguments):
        if not others:
            others.append(None)
            others[0] = command(*pull)
        fetch(*arguments)

    monkeypatch.setattr(pulling, "fetch_chunk", late)
    assert [command(*pull).exit_code, others[0].exit_code] == [0, 0]
    (root,) = (path for path in namespace_root(memory_dir, "x").parent.iterdir() if path.name != "before")
    assert [len(MemoryTier(root).parts()), len(os.listdir(root / "slots"))] == [1, 0], (
        "nothing is left of what it had brought itself"
    )
    assert command("verify", run, "--memory-dir", memory_dir).exit_code == 0


def test_two_pulls_that_bring_the_same_part_at_once_both_end_well(run, memory_dir, monkeypatch):
    """They meet where each has begun the part's folder."""
    pull, prepare, others = ("pull", run, "--memory-dir", memory_dir), memory.prepare_markers, []

    def late(*arguments, **options):
        if not others:
            others.append(None)
            others[0] = command(*pull)
        prepare(*arguments, **options)

    monkeypatch.setattr(memory, "prepare_markers", late)
    first = command(*pull)
    assert [first.exit_code, others[0].exit_code] == [0, 0], (first.exception, others[0].exception)
    (root,) = (path for path in namespace_root(memory_dir, "x").parent.iterdir() if path.name != "before")
    (stored,) = MemoryTier(root).parts()
    assert os.listdir(stored.folder.parent) == ["rank-00000"]
    assert os.listdir(root / "slots") == []
    assert command("verify", run, "--memory-dir", memory_dir).exit_code == 0


def test_where_the_job_here_has_a_namespace_of_its_own_that_is_said(run, memory_dir, tmp_path, monkeypatch):
    io = TieredCheckpointIO(dirpath=run, memory_dir=memory_dir, namespace="live", drain="thread")
    io.save_checkpoint({"global_step": 6}, "step=6.ckpt")
    io.teardown()
    at_another, there = (
        command("pull", run, "--memory-dir", memory_dir, *named) for named in ((), ("--namespace", "live"))
    )
    assert (at_another.exit_code, "give --namespace live" in at_another.stderr) == (0, True)
    assert (there.exit_code, there.stderr) == (0, "")
    # A shell leaves the ~ in --to=~/x.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert command("pull", run, "--to=~/x", "--memory-dir", memory_dir).stderr == ""
    assert (tmp_path / "home" / "x" / "step=6.ckpt").exists()


@pytest.mark.parametrize("to", ["memory", "folder"])
def test_beside_a_run_that_overwrites_and_removes_what_is_read(to, run, memory_dir, tmp_path, monkeypatch):
    """It is not damaged: the pull takes what the name means by then."""
    fetch, turns = pulling.fetch_chunk, []
    io = TieredCheckpointIO(dirpath=run, memory_dir=memory_dir, namespace="live", drain="thread")

    def late(*arguments):
        if turns:
            turns.pop()()
        fetch(*arguments)

    def overwrite():
        io.save_checkpoint({"global_step": 6, "weights": torch.randn(1000)}, "step=5.ckpt")

    def replace():
        io.save_checkpoint({"global_step": 7}, "step=7.ckpt")
        io.remove_checkpoint("step=5.ckpt")
        io.checkpointer.session.wait()

    monkeypatch.setattr(pulling, "fetch_chunk", late)
    where = ("--to", str(tmp_path / "here")) if to == "folder" else ("--memory-dir", memory_dir, "--namespace", "other")
    turns[:] = [replace, overwrite]
    done = command("pull", run, *where, "--json")
    assert (done.exit_code, json.loads(done.stdout)["name"]) == (0, "step=7.ckpt"), done.exception
    turns[:] = [overwrite] * 3
    overwrite()
    done = command("pull", run, "step=5.ckpt", *where)
    assert isinstance(done.exception, StoreChangedError)
    assert "step=5.ckpt was removed or overwritten while it was read" in str(done.exception)
    io.teardown()


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_of_an_overwrite_that_has_not_come_to_its_end_the_checkpoint_before_is_pulled(kind, memory_dir, tmp_path):
    """The node died amid the upload: a restart takes what the file still is."""
    store, to = DirectoryStore(str(tmp_path / "run")), tmp_path / "here"
    committing.save(store, "a", 1, kind=kind)
    committing.begin_overwrite(store, "a", 2, kind=kind)
    pull = ("pull", store.url, "--memory-dir", memory_dir)
    for where in ((), ("--to", str(to))):
        done = command(*pull, *where, "--json")
        assert (done.exit_code, json.loads(done.stdout)["step"]) == (0, 1), done.exception
    assert {path.name for path in to.rglob("*") if path.is_file()} == {
        path.name for path in (tmp_path / "run").glob("a" if kind == "full" else "a/*") if "00000002" not in path.name
    }
    if kind == "sharded":
        # Another node asks for its part alone, of which both are there: it must be of the same save.
        done = command(*pull, "--namespace", "other", "--rank", "1", "--json")
        assert (done.exit_code, json.loads(done.stdout)["step"]) == (0, 1), done.exception
    # Begun anew, it has changed over, and the manifest does not say so yet.
    switch = tmp_path / "run" / ("a" if kind == "full" else "a/.metadata")
    before = switch.read_bytes()
    manifest = store.get(manifest_key("a"))
    committing.save(store, "a", 2, kind=kind)
    assert readable(store, "a") == 2
    store.put(manifest_key("a"), manifest)
    done = command(*pull, "--json")
    assert (done.exit_code, json.loads(done.stdout)["step"]) == (0, 2), done.exception
    # What is neither the one nor the other is damaged.
    switch.write_bytes(before[::-1])
    done = command(*pull, "--to", str(tmp_path / "none"))
    assert isinstance(done.exception, CorruptCheckpointError)
    assert not [path for path in (tmp_path / "none").rglob("*") if path.is_file()]


def test_what_an_overwrite_was_to_bring_decides_on_nothing_that_is_pulled(memory_dir, tmp_path, monkeypatch):
    """Neither how many parts it would have, nor how much room it would take."""
    store = DirectoryStore(str(tmp_path / "run"))
    pull = ("pull", store.url, "--memory-dir", memory_dir, "--json")
    committing.save(store, "parts", 1, kind="sharded")
    committing.begin_overwrite(store, "parts", 2, kind="sharded")
    manifest = read_manifest(store, "parts")
    fewer = replace(manifest.content, parts=1, coordinator=0)
    assert manifest.content.parts > 1
    store.put(manifest_key("parts"), replace(manifest, content=fewer).to_json())
    done = command(*pull, "parts", "--rank", "1")
    assert (done.exit_code, json.loads(done.stdout)["step"]) == (0, 1), done.exception
    committing.save(store, "a", 1)
    committing.begin_overwrite(store, "a", 2)
    acquire = MemoryTier.acquire
    refused = []

    def full(tier, size):
        if not refused:
            refused.append(size)
            raise MemoryFullError("no room", operation="stage", tier="memory")
        return acquire(tier, size)

    monkeypatch.setattr(MemoryTier, "acquire", full)
    done = command(*pull, "a")
    assert (done.exit_code, json.loads(done.stdout)["step"], len(refused)) == (0, 1, 1), done.exception


def test_to_a_folder_and_what_goes_wrong(run, memory_dir, tmp_path):
    to = tmp_path / "here"
    assert command("pull", run, "--to", str(to), "--memory-dir", memory_dir).exit_code == 0
    assert torch.load(to / "step=5.ckpt")["global_step"] == 5
    assert isinstance(command("pull", run, "--to", str(to)).exception, ExportError)
    assert isinstance(command("pull", run, "never.ckpt").exception, CheckpointNotFoundError)
    assert command("pull", run, "--namespace", "../x").exit_code == 2
    damaged = tmp_path / "run" / "step=5.ckpt"
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    for arguments in (("--memory-dir", memory_dir), ("--to", str(tmp_path / "new"))):
        assert isinstance(command("pull", run, *arguments).exception, CorruptCheckpointError)
    # Nothing is left of them.
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    (root,) = (path for path in namespace_root(memory_dir, "x").parent.iterdir() if path.name != "before")
    assert [*MemoryTier(root).parts(), *os.listdir(root / "slots")] == []


@pytest.mark.matrix
def test_parts_of_some_ranks(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "run"))
    for rank in (0, 1):
        node.part("s", 1, rank)
    node.drain()
    pulled = ("pull", node.dirpath, "--memory-dir", memory_dir, "--namespace", "other")
    assert command(*pulled, "--rank", "2").exit_code == 2
    assert json.loads(command(*pulled, "--rank", "1", "--json").stdout)["ranks"] == [1]
    tier = MemoryTier(namespace_root(memory_dir, "other"))
    assert [stored.part.rank for stored in tier.parts()] == [1]
    assert command(*pulled).exit_code == 0
    assert [(stored.part.rank, stored.pending) for stored in tier.parts()] == [(0, False), (1, False)]


@pytest.mark.parametrize(
    "arguments",
    [
        "pull {run} --to {empty}",
        "export {run} x {empty}",
        "export {run} x {empty} --format safetensors",
        "prune {run} --config {empty}",
        "status --prometheus --textfile {empty}",
    ],
)
def test_an_empty_path_is_not_the_working_directory(arguments, tmp_path, monkeypatch):
    # As of "$FOLDER", where that is not set.
    monkeypatch.chdir(tmp_path)
    values = {"{run}": str(tmp_path / "run"), "{empty}": ""}
    done = command(*(values.get(each, each) for each in arguments.split()))
    assert (done.exit_code, "it is empty" in done.stderr) == (2, True), done.output
    assert not os.listdir(tmp_path)
