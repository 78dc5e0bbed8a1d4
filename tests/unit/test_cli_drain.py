"""The status of ``tiered-ckpt drain``: 0 only where nothing is left to do, and nothing was lost."""

import json

import pytest
from support.draining import Node
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.errors import DrainError


@pytest.fixture
def node(memory_dir, tmp_path):
    return Node(memory_dir, str(tmp_path / "run"))


def drain(node, *options):
    return CliRunner().invoke(app, ["drain", *node.where, *options])


def test_one_that_leaves_the_work_to_another_says_so(node):
    """As in an epilog, while the drain of the run still waits for a server: the node may not go yet."""
    saved = node.save("a.ckpt", b"A")
    other = try_lock(node.root / LOCK_FILE)
    left = drain(node)
    assert isinstance(left.exception, DrainError)
    assert "1 operation is not done" in str(left.exception)
    assert "another drain works on this namespace: tiered-ckpt flush waits for it" in left.exception.hint
    release(other)
    assert (drain(node).exit_code, node.states()) == (0, {saved: "committed"})
    # Where that has nothing to do, neither has this.
    other = try_lock(node.root / LOCK_FILE)
    assert [drain(node, *options).exit_code for options in ([], ["--once"])] == [0, 0]
    release(other)


def test_one_that_gives_up_says_so(node, tmp_path):
    node.save("a.ckpt", b"A")
    (tmp_path / "run").write_bytes(b"in the way")
    left = drain(node)
    assert isinstance(left.exception, DrainError)
    assert "1 operation is not done" in str(left.exception)
    (tmp_path / "run").unlink()
    assert drain(node).exit_code == 0


@pytest.mark.parametrize("options", [[], ["--once"], ["--once", "--json"]])
def test_a_save_that_is_found_damaged_is_an_error(node, options):
    node.save("a.ckpt", b"A" * 100)
    node.save("b.ckpt", b"B" * 100)
    (held,) = node.root.glob("saves/*/*/a.ckpt")
    held.write_bytes(b"?" * 100)
    done = drain(node, *options)
    assert isinstance(done.exception, DrainError)
    assert "save of a.ckpt failed: " in str(done.exception)
    assert "not tried again" in done.exception.hint
    if "--json" in options:
        document = json.loads(done.stdout)
        assert [each["outcome"] for each in document["outcomes"]] == ["failed", "committed"]
        assert document["operations_left"] == 0
    # It is in quarantine, and was said: the next drain has nothing to complain of.
    assert drain(node, *options).exit_code == 0
