"""The command that deletes a namespace from node memory: its dry run, and memory that a reboot or a kill took."""

import functools
import shutil
from dataclasses import replace

import pytest
from support import committing, processes
from support.documented import command, document_of
from support.draining import Node, part_of
from support.restoring import of_a_newer_release
from support.sharded import full_part
from support.silent import silent_server
from support.waiting import until

from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE
from tiered_checkpoint_io.engine.leasing import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory.node import is_lost, release, try_lock
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def spilled(memory_dir, tmp_path):
    """Returns a node with one checkpoint in memory, and a newer one on its disk."""
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
    return command(*line)


def memory_only(node):
    node.save("1.ckpt", b"A")
    node.save("2.ckpt", b"B", durable=False)
    node.drain()


def replicated(node):
    """All nodes may be cleaned at once."""
    node.save("2.ckpt", b"A", durable=False, step=2)
    node.tier.mark_replicated(node.tier.parts()[0])


def overwriting(node):
    """Another node's drain is overwriting the name, and may die: then this replica is all that is left."""
    store = DirectoryStore(node.dirpath)
    committing.save(store, "2.ckpt", 1)
    committing.begin_overwrite(store, "2.ckpt", 2)
    part, files = full_part("2.ckpt", 2)
    node.tier.replicas.commit(replace(part, dirpath=node.dirpath), files)


def queued(node):
    node.save("1.ckpt", b"A")


def unreadable(node, *, folder="saves", newer=False):
    node.save("1.ckpt", b"A")
    node.drain()
    node.save("2.ckpt", b"B")
    stored = next(each for each in node.tier.parts() if each.part.name == "2.ckpt")
    written = (stored.folder / "part.json").read_bytes()
    (stored.folder / "part.json").write_bytes(of_a_newer_release(written) if newer else written[:-50])
    if folder == "replicas":
        (node.root / "replicas" / stored.save_id).mkdir()
        stored.folder.rename(node.root / "replicas" / stored.save_id / stored.folder.name)


NEWEST = "its newest checkpoint 2.ckpt (step 2) is not on the durable tier"


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (memory_only, NEWEST),
        (replicated, NEWEST),
        (overwriting, NEWEST),
        (queued, "1 operation not yet durable"),
        (unreadable, "a part can't be read: not JSON"),
        (functools.partial(unreadable, newer=True), "a part can't be read: format version"),
        (functools.partial(unreadable, folder="replicas"), "a part can't be read: not JSON"),
    ],
    ids=["memory only", "replicated", "overwriting", "queued", "damaged", "newer", "damaged replica"],
)
def test_a_dry_run_warns_of_what_would_be_lost_and_yes_deletes_it(node, prepare, said):
    prepare(node)
    before = sorted(node.root.rglob("part.json"))
    refused = clean(node)
    assert (refused.exit_code, said in refused.stderr, "would go; delete with --yes" in refused.stdout) == (
        1,
        True,
        True,
    ), refused.stderr
    assert sorted(node.root.rglob("part.json")) == before
    rows = document_of("clean", clean(node, "--json"))["checkpoints"]
    unread = [each["problem"] for each in rows if each["state"] in ("corrupt", "newer_release")]
    assert ["JSON" in each or "version" in each for each in unread] == [True] * ("can't be" in said)
    done = clean(node, "--yes")
    assert (done.exit_code, "ckpt" in done.stdout, node.root.exists()) == (0, True, False), done.exception


def test_it_ends_a_sidecar_that_has_nothing_to_do(node):
    """A DaemonSet's sidecar holds the drain's lock for ever."""
    op = node.save("1.ckpt", b"A")
    with processes.start("flush", "--stay", *node.where) as sidecar:
        try:
            until(lambda: node.states() == {op: "committed"})
            done = clean(node, "--yes")
            _, err = sidecar.communicate(timeout=30)
        finally:
            sidecar.kill()
    assert (done.exit_code, "1.ckpt" in done.stdout, node.root.exists()) == (0, True, False), done
    assert (sidecar.returncode, "error" in err) == (0, False)


def test_it_leaves_what_a_trainer_uses_or_a_drain_works_on(node):
    node.save("1.ckpt", b"A")
    for name in (TRAINERS_FILE, JOB_FILE, LOCK_FILE):
        user = try_lock(node.root / name)
        refused = clean(node, "--yes")
        assert isinstance(refused.exception, ConfigError)
        assert "a trainer or drain uses it" in str(refused.exception)
        assert not is_lost(user)
        release(user)
    # A killed command has put something away: it goes with the next one, unless another command is at work there.
    left = node.root.with_name(f".{node.root.name}.cleaned-0123")
    (left / "saves").mkdir(parents=True)
    another = try_lock(left / TRAINERS_FILE)
    clean(node)
    assert left.exists()
    release(another)
    assert clean(node, "--yes").exit_code == 0
    assert not left.exists()
    assert not node.root.exists()


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
        patched.setattr(shutil, "rmtree", killed)
        assert clean(spilled, "--yes").exit_code == 130
    assert not spilled.root.exists()
    assert clean(spilled, "--yes").exit_code == 0
    assert not spilled.spill.exists()
    assert not spilled.root.parent.exists(), "nor is anything that was put away left"


def test_what_is_durable_or_not_the_newest_is_nothing_to_warn_of(node):
    memory_only(node)
    node.save("3.ckpt", b"C")
    node.save("weights.ckpt", b"W", durable=False, resumable=False)
    node.drain()
    refused = clean(node)
    assert (refused.exit_code, refused.stderr) == (0, "")
    assert f"4 parts, 0.00 KiB, and {node.root} would go" in refused.stdout
    done = clean(node, "--yes")
    assert (done.exit_code, f"removed 4 parts, 0.00 KiB, and {node.root}" in done.stdout) == (0, True)


def test_it_warns_if_it_can_not_ask(memory_dir, monkeypatch):
    with silent_server(monkeypatch) as endpoint:
        node = Node(memory_dir, "s3://bucket/run", endpoint_url=endpoint, durable_timeout_s=1)
        node.save("1.ckpt", b"A", durable=False)
        refused = clean(node)
    assert refused.exit_code == 1
    assert "could not check whether its newest checkpoint 1.ckpt" in refused.stderr
    assert len(node.tier.parts()) == 1
