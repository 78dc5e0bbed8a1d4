"""What is given to commands by name: checkpoints as URLs or choices, folders, and what is mistyped."""

import os

import pytest
from support.documented import verified
from support.draining import Node
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError


def command(*arguments):
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def node(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "run"))
    node.save("a.ckpt", b"A")
    node.drain()
    return node


@pytest.mark.parametrize("tier", [[], ["--tier", "memory"]])
def test_a_memory_dir_that_is_mistyped_is_not_passed_by(node, memory_dir, tier):
    """The durable tier alone would be intact, and node memory taken for it."""
    wrong = command("verify", node.dirpath, "--memory-dir", f"{memory_dir}/typo", *tier)
    assert isinstance(wrong.exception, ConfigError)
    assert f"there is no folder {memory_dir}/typo" in str(wrong.exception)
    right = command("verify", node.dirpath, "--memory-dir", memory_dir)
    assert (right.exit_code, right.stdout.count("memory\ta.ckpt")) == (0, 1)


def test_a_machine_without_node_memory_verifies_the_durable_tier(node, monkeypatch, tmp_path):
    is_dir = os.path.isdir
    monkeypatch.setattr("os.path.isdir", lambda path: path != "/dev/shm" and is_dir(path))
    done = command("verify", node.dirpath)
    assert (done.exit_code, done.stdout) == (0, verified(("intact", "durable", "a.ckpt")))


def test_a_memory_dir_below_the_home_is_found(node, memory_dir, monkeypatch):
    home, _, last = memory_dir.rpartition("/")
    monkeypatch.setenv("HOME", home)
    for name in ("status", "ls", "verify", "clean"):
        done = command(name, f"--memory-dir=~/{last}")
        assert (done.exit_code, "a.ckpt" in done.stdout) == (0, True), (name, done.exception)
    assert command("ls", "--memory-dir=").exit_code == 2


def test_a_checkpoint_is_flushed_by_its_url_and_as_the_latest(node):
    where = node.where
    node.save("x/b.ckpt", b"B", durable=False)
    node.save("weights.ckpt", b"C", durable=False, resumable=False)
    for name in ("other.ckpt", f"{node.dirpath}/other.ckpt", "/elsewhere/x/b.ckpt", "tiered:last"):
        wrong = command("flush", name, *where)
        assert isinstance(wrong.exception, CheckpointNotFoundError)
        assert f"no such checkpoint: {name}" in str(wrong.exception)
    flushed = command("flush", "tiered:latest", *where)
    assert (flushed.exit_code, "\nx/b.ckpt\t2\t0.00 KiB\tdurable\t" in flushed.stdout) == (0, True), flushed.exception
    flushed = command("flush", f"{node.dirpath}/weights.ckpt", *where)
    assert (flushed.exit_code, "\nweights.ckpt\t3\t0.00 KiB\tdurable\t" in flushed.stdout) == (0, True), (
        flushed.exception
    )
