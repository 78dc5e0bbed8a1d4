"""The commands that fetch a checkpoint to node memory or files, and that verify both tiers."""

import json
import os

import pytest
import torch
from support import committing
from support.documented import command, document_of
from support.draining import part_of
from support.restoring import flip
from support.sharded import readable
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, SaveError
from tiered_checkpoint_io.memory.tier import MemoryTier, namespace_root
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def run(memory_dir, tmp_path):
    """Returns a run's dirpath, with a full checkpoint by a trainer's IO; its node is lost."""
    dirpath = str(tmp_path / "run")
    io = build(TieredCheckpointIO, dirpath=dirpath, memory_dir=memory_dir, namespace="gpt-1", drain="thread")
    io.save_checkpoint({"global_step": 5, "weights": torch.arange(1000.0)}, f"{dirpath}/step=5.ckpt")
    io.teardown()
    assert command("clean", "--yes", "--memory-dir", memory_dir, "--namespace", "gpt-1").exit_code == 0
    return dirpath


def test_a_restart_of_the_job_reads_from_memory(run, memory_dir):
    """The job looks only in its own namespace, which the manifest names."""
    done = command("get", run, "--memory-dir", memory_dir, "--json")
    document = document_of("get", done)
    assert (done.exit_code, document["name"], document["step"]) == (0, "step=5.ckpt", 5)
    io = TieredCheckpointIO(dirpath=run, memory_dir=memory_dir, namespace="gpt-1")
    state = io.load_checkpoint("tiered:latest")
    assert io.checkpointer.restored.tier == "memory"
    assert torch.equal(state["weights"], torch.arange(1000.0))
    io.teardown()
    # Again: nothing is fetched; a damaged copy is taken away first.
    again = command("get", run, "--memory-dir", memory_dir)
    assert (again.exit_code, "already, intact" in again.stdout) == (0, True)
    assert document["namespace"] == "gpt-1"
    (held,) = namespace_root(memory_dir, "gpt-1").glob("saves/*/*/step=5.ckpt")
    held.write_bytes(b"?" * held.stat().st_size)
    assert "fetched step=5.ckpt" in command("get", run, "step=5.ckpt", "--memory-dir", memory_dir).stdout
    assert command("verify", run, "--memory-dir", memory_dir).exit_code == 0


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_of_an_overwrite_that_has_not_come_to_its_end_the_checkpoint_before_is_fetched(kind, memory_dir, tmp_path):
    """The node died during the upload: a restart reads the file's old content."""
    store, to = DirectoryStore(str(tmp_path / "run")), tmp_path / "here"
    committing.save(store, "a", 1, kind=kind)
    committing.begin_overwrite(store, "a", 2, kind=kind)
    line = ("get", store.url, "--memory-dir", memory_dir)
    for where in ((), ("tiered:latest", str(to))):
        done = command(*line, *where, "--json")
        assert (done.exit_code, json.loads(done.stdout)["step"]) == (0, 1), done.exception
    assert {path.name for path in to.rglob("*") if path.is_file()} == {
        path.name for path in (tmp_path / "run").glob("a" if kind == "full" else "a/*") if "00000002" not in path.name
    }
    # The second try has changed over, and the manifest does not say so yet.
    switch = tmp_path / "run" / ("a" if kind == "full" else "a/.metadata")
    before = switch.read_bytes()
    manifest = store.get(manifest_key("a"))
    committing.save(store, "a", 2, kind=kind)
    assert readable(store, "a") == 2
    store.put(manifest_key("a"), manifest)
    done = command(*line, "--json")
    assert (done.exit_code, json.loads(done.stdout)["step"]) == (0, 2), done.exception
    # A file with neither content is damaged.
    switch.write_bytes(before[::-1])
    done = command(*line, "tiered:latest", str(tmp_path / "none"))
    assert isinstance(done.exception, CorruptCheckpointError)
    assert not [path for path in (tmp_path / "none").rglob("*") if path.is_file()]


@pytest.mark.parametrize("to", ["here", "model.pt", "model.safetensors"])
def test_a_file_that_exists_is_replaced_only_with_yes(to, run, tmp_path):
    """Whole, or not at all: an error leaves the earlier file, and no other file."""
    line = ["get", run, "step=5.ckpt", str(tmp_path / to)]
    line += ["--prefix", ""] if to == "model.safetensors" else []
    assert command(*line).exit_code == 0

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "run" not in path.parts}

    made = files()
    (path,) = made
    if to != "model.safetensors":
        assert torch.load(path)["global_step"] == 5
    path.write_bytes(b"earlier")
    kept = command(*line)
    assert isinstance(kept.exception, SaveError)
    assert f"{path} exists already" in str(kept.exception)
    assert "--yes" in kept.exception.hint
    assert files() == {path: b"earlier"}
    good = (tmp_path / "run" / "step=5.ckpt").read_bytes()
    (tmp_path / "run" / "step=5.ckpt").write_bytes(good[:-1] + b"?")
    assert isinstance(command(*line, "--yes").exception, CorruptCheckpointError)
    assert files() == {path: b"earlier"}
    (tmp_path / "run" / "step=5.ckpt").write_bytes(good)
    assert command(*line, "--yes").exit_code == 0
    assert files() == made


def test_what_goes_wrong(run, memory_dir, tmp_path):
    assert isinstance(command("get", run, "never.ckpt").exception, CheckpointNotFoundError)
    x = str(tmp_path / "x")
    wrong = [["--namespace", "../x"], ["--yes"], ["step=5.ckpt", x, "--prefix", "a."]]
    wrong += [["step=5.ckpt", f"{x}.pt", "--namespace", "x"]]
    for arguments in wrong:
        assert command("get", run, *arguments).exit_code == 2, arguments
    damaged = tmp_path / "run" / "step=5.ckpt"
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    for arguments in (("--memory-dir", memory_dir), ("step=5.ckpt", str(tmp_path / "new"))):
        assert isinstance(command("get", run, *arguments).exception, CorruptCheckpointError)
    # No file of them is left.
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    root = namespace_root(memory_dir, "gpt-1")
    assert [*MemoryTier(root).parts(), *os.listdir(root / "slots")] == []


@pytest.fixture
def node(node):
    """Makes checkpoints: one on both tiers, one of two ranks on both, one only in memory, and a replica."""
    node.save("a.ckpt", b"A" * 100)
    for rank in (0, 1):
        node.part("b", 2, rank)
    node.drain()
    node.save("c.ckpt", b"C" * 100, durable=False)
    slot = node.tier.replicas.acquire(3)
    slot.view[:3] = b"DDD"
    node.tier.replicas.commit(part_of("d.ckpt", b"DDD", 9, node.dirpath), {"d.ckpt": slot})
    return node


def verified(node, *arguments):
    done = command("verify", node.dirpath, *node.where, "--json", *arguments)
    document = document_of("verify", done)
    assert document["intact"] == (done.exit_code == 0)
    return done.exit_code, document["checkpoints"]


def test_damage_is_named_by_file_tier_and_rank(node, tmp_path):
    status, rows = verified(node)
    copies = {(row["name"], row["tier"], row["rank"], row["copy"]) for row in rows}
    assert status == 0
    assert {row["state"] for row in rows} == {"intact"}
    assert copies == {
        *((name, "durable", None, None) for name in ("a.ckpt", "b")),
        *(("b", "memory", rank, "own") for rank in (0, 1)),
        *((name, "memory", 0, "own") for name in ("a.ckpt", "c.ckpt")),
        ("d.ckpt", "memory", 0, "replica"),
    }
    (held,) = node.root.glob("saves/*/rank-00000/c.ckpt")
    (copy,) = node.root.glob("replicas/*/rank-00000/d.ckpt")
    shard = tmp_path / "run" / "b" / "__1_1.distcp"
    for path in (held, copy, shard):
        flip(path, 0)
    status, rows = verified(node)
    damaged = {row["file"]: (row["tier"], row["rank"], row["copy"]) for row in rows if row["state"] == "damaged"}
    assert status == 1
    assert damaged == {
        str(held): ("memory", 0, "own"),
        str(copy): ("memory", 0, "replica"),
        str(shard): ("durable", 1, None),
    }
    lines = command("verify", node.dirpath, *node.where).stdout.splitlines()
    (line,) = [line for line in lines if "c.ckpt" in line]
    assert line == f"DAMAGED\tmemory\tc.ckpt\t0\town\t{held}: bytes 0-100 of 'c.ckpt' differ from their hash"
    # verify does not move damaged parts: a restart quarantines them, and looks for the next copy.
    assert held.exists()


def test_one_tier_and_one_checkpoint(node):
    assert [row["tier"] for row in verified(node, "--tier", "memory")[1]] == ["memory"] * 5
    assert [row["tier"] for row in verified(node, "--tier", "durable")[1]] == ["durable"] * 2
    assert [(row["name"], row["tier"]) for row in verified(node, "a.ckpt")[1]] == [
        ("a.ckpt", "memory"),
        ("a.ckpt", "durable"),
    ]
    # A restart takes the replica: it is the latest save.
    assert [row["name"] for row in verified(node, "tiered:latest")[1]] == ["d.ckpt"]
    alone = command("verify", *node.where)
    assert (alone.exit_code, alone.stdout.count("memory\t"), alone.stdout.count("durable")) == (0, 5, 0)
    assert command("verify", "--tier", "durable").exit_code == 2
    missing = command("verify", node.dirpath, "never.ckpt", *node.where)
    assert isinstance(missing.exception, CheckpointNotFoundError)
