"""``clean`` where memory, which tells where the spill is, was lost or put away already."""

import fcntl
import shutil
from dataclasses import replace

import pytest
from support.documented import document_of
from support.draining import Node, part_of
from support.sharded import make_part
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.cli import clean as cleaning
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory import ownership


@pytest.fixture
def spilled(memory_dir, tmp_path):
    """A node with one checkpoint in memory, and a newer one on its disk."""
    node = Node(memory_dir, str(tmp_path / "run"), spill_dir=str(tmp_path / "disk"))
    node.save("a.ckpt", b"A", durable=False)
    node.tier.use_spill(str(tmp_path / "disk"))
    spill = node.tier.open_spill()
    slot = spill.acquire(3)
    slot.view[:3] = b"BBB"
    spill.commit(part_of("b.ckpt", b"BBB", 2, node.dirpath), {"b.ckpt": slot})
    node.spill = spill.root
    return node


def clean(node, *options):
    line = ["clean", "--memory-dir", str(node.root.parent.parent), "--namespace", node.root.name, *options]
    return CliRunner().invoke(app, line)


def test_after_a_reboot_it_has_to_be_told_where_the_spill_is(spilled, tmp_path):
    shutil.rmtree(spilled.root)
    done = clean(spilled)
    assert (done.exit_code, spilled.spill.is_dir()) == (0, True)
    assert "nothing in memory at " in done.stdout
    assert "a spill_dir other than auto is not known here: give --spill-dir" in done.stdout
    named = ("--spill-dir", str(tmp_path / "disk"))
    # What waits is kept, as in memory.
    refused = clean(spilled, *named)
    assert isinstance(refused.exception, ConfigError)
    assert "1 operation not yet durable" in str(refused.exception)
    done = clean(spilled, *named, "--force")
    assert (done.exit_code, spilled.spill.is_dir()) == (0, False)
    assert "removed b.ckpt (step 2): 1 part" in done.stdout
    assert str(spilled.spill) in done.stdout
    again = clean(spilled, *named)
    assert (again.exit_code, f"no spill of it in {tmp_path / 'disk'}" in again.stdout) == (0, True)


@pytest.mark.parametrize("killed_at", [1, 2])
def test_one_that_was_killed_is_finished_by_the_next(spilled, monkeypatch, killed_at):
    """Memory was renamed, and is not found any more; the spill is deleted, or not yet."""
    remove, calls = shutil.rmtree, []

    def killed(folder, **options):
        calls.append(folder)
        if len(calls) == killed_at:
            raise KeyboardInterrupt
        remove(folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(cleaning.shutil, "rmtree", killed)
        assert clean(spilled, "--force").exit_code == 130
    assert not spilled.root.exists()
    assert clean(spilled, "--force").exit_code == 0
    assert not spilled.spill.exists()
    assert not spilled.root.parent.exists(), "nor is anything that was put away left"


def test_a_spill_in_use_is_kept_though_its_memory_is_not_seen_here(spilled, tmp_path):
    """As by a container with a tmpfs of its own; the spill's folder may be given in another spelling, too."""
    shutil.rmtree(spilled.root)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    named = ("--spill-dir", str(tmp_path / "link"), "--force")
    kept = clean(spilled, *named)
    assert (kept.exit_code, spilled.spill.is_dir()) == (0, True)
    assert f"a trainer or drain whose memory is not seen here uses the spill in {tmp_path / 'link'}" in kept.stdout
    ownership._drop_in_child()  # as when its process ends
    done = clean(spilled, *named)
    assert (done.exit_code, spilled.spill.exists()) == (0, False)


def test_by_force_the_document_names_what_could_not_be_read(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "run"))
    for name in ("a.ckpt", "b.ckpt"):
        node.save(name, b"A", durable=False)
    (damaged,) = [stored.folder for stored in node.tier.parts() if stored.part.name == "b.ckpt"]
    (damaged / "part.json").write_text("{")
    document = document_of("clean", clean(node, "--force", "--json"))
    assert [row["name"] for row in document["removed"]] == ["a.ckpt"]
    assert [row["folder"] for row in document["unreadable"]] == [str(damaged)]
    assert "JSON" in document["unreadable"][0]["error"]


def test_it_keeps_what_a_restart_needs_beside_the_newest(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "run"))
    for name in ("step=90-EMA.ckpt", "step=90.ckpt"):
        node.save(name, b"A", durable=name == "step=90.ckpt", step=90)
    node.part("local", 3, 0, kind="local", world_size=1)
    node.drain()
    assert "newest checkpoint step=90-EMA.ckpt (step 90) is not on the durable tier" in str(clean(node).exception)
    assert CliRunner().invoke(app, ["flush", *node.where]).exit_code == 0
    # A newer one of another payload is no substitute.
    part, files = make_part("memory", 4, 0, kind="local", world_size=1, dirpath=node.dirpath)
    node.tier.commit(replace(part, durable=False), files)
    node.number = 4
    node.save("step=91.ckpt", b"A", step=91)
    node.drain()
    assert "newest checkpoint memory (step 4) is not on the durable tier" in str(clean(node).exception)
    assert CliRunner().invoke(app, ["flush", *node.where]).exit_code == 0
    assert clean(node).exit_code == 0


@pytest.mark.parametrize("in_use", [False, True])
def test_it_tells_of_another_spill_that_it_leaves(spilled, tmp_path, in_use):
    other = spilled.spill.with_name(f"{spilled.spill.name}-2")
    other.mkdir(0o700)
    named = ("--spill-dir", str(tmp_path / "disk"))
    with (other / ownership.OWNER_FILE).open("w") as owner:
        if in_use:
            fcntl.flock(owner, fcntl.LOCK_SH)
        done = clean(spilled, *named, "--force")
    assert (done.exit_code, spilled.spill.exists(), other.is_dir()) == (0, False, True)
    assert f"another spill of this namespace is left at {other}: " in done.stdout
    ownership._drop_in_child()
    if in_use:
        assert "uses it" in done.stdout.splitlines()[-1]
    else:
        assert f"run clean again, with {' '.join(named)}" in done.stdout
        assert clean(spilled, *named).exit_code == 0
        assert not other.exists()
