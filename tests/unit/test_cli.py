"""The command line over node memory, as a person at a node uses it."""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from support import committing
from support.clocks import quick
from support.draining import Node, names, where_of
from support.launch import free_port
from support.restoring import of_a_newer_release
from support.sharded import full_part, make_part
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.cli import clean as cleaning
from tiered_checkpoint_io.engine.drain.locks import is_lost, release, try_lock
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.engine.leasing.namespace_lock import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.stores import open_store
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
    with pytest.raises(ConfigError, match="not yet durable"):
        raise command("clean", *where).exception
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
    assert command("verify", node.dirpath, f"{node.dirpath}/last.ckpt").stdout.startswith("DAMAGED  durable  last.ckpt")

    for held in (TRAINERS_FILE, JOB_FILE):
        trainer = try_lock(node.root / held, shared=True)
        refused = command("clean", *where)
        assert isinstance(refused.exception, ConfigError)
        assert "a trainer or drain uses it" in str(refused.exception)
        release(trainer)
    assert command("clean", *where).exit_code == 0
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


def test_status_and_show_call_durable_only_what_is_there(node, memory_dir):
    where = ("--memory-dir", memory_dir)
    node.save("old.ckpt", b"A")
    node.save("new.ckpt", b"B")
    node.delete("old.ckpt")
    given_up = node.save("given-up.ckpt", b"C")
    node.cancel(given_up)
    node.drain()
    assert names(DirectoryStore(node.dirpath)) == ["new.ckpt"]
    shown = command("status", *where).stdout.partition("Last operations")[0]
    states = {cells[0]: cells[4] for cells in rows(shown, ".ckpt")}
    assert states == {"old.ckpt": "memory only", "new.ckpt": "durable", "given-up.ckpt": "memory only"}
    assert {cells[0]: cells[7] for cells in rows(command("ls", *where).stdout, ".ckpt")} == states
    for name, state in states.items():
        (part,) = rows(command("ls", node.dirpath, name, *where).stdout.partition("Parts on this node")[2], "0")
        assert (name, part[3]) == (name, state)


def rows(table, name):
    """The rows of a table whose first column holds ``name``, by columns."""
    return [cells for line in table.splitlines() if name in (cells := line.split("\t"))[0]]


def test_a_namespace_that_is_not_there_is_an_error(memory_dir):
    refused = command("status", "--memory-dir", memory_dir, "--namespace", "none")
    assert isinstance(refused.exception, ConfigError)
    assert "no memory tier" in str(refused.exception)


@pytest.mark.parametrize("what", ["status", "flush", "clean"])
def test_a_root_that_is_no_memory_tier_is_left_as_it_is(what, tmp_path):
    precious = namespace_root(str(tmp_path), "precious")
    precious.mkdir(parents=True)
    (precious / "file").touch()
    for root in (precious, *([precious.with_name("none")] if what != "clean" else [])):
        refused = command(what, *where_of(root), *(["--force"] if what == "clean" else []))
        assert isinstance(refused.exception, ConfigError)
        assert "no memory tier" in str(refused.exception)
    assert os.listdir(precious) == ["file"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can enter another user's folder")
@pytest.mark.parametrize("what", [("flush", "--timeout", "5"), ("flush", "--stay"), ("clean",)])
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


# ------------------------------------------------------------------------------------------- clean
def test_clean_keeps_a_newest_checkpoint_that_is_nowhere_else(node, memory_dir):
    where = ("--memory-dir", memory_dir)
    node.save("1.ckpt", b"A")
    node.save("2.ckpt", b"B", durable=False)
    node.drain()
    refused = command("clean", *where)
    assert isinstance(refused.exception, ConfigError)
    assert "newest checkpoint 2.ckpt (step 2) is not on the durable tier" in str(refused.exception)
    assert len(node.tier.parts()) == 2
    # What is not the newest, or can't be resumed from, keeps nothing.
    node.save("3.ckpt", b"C")
    node.save("weights.ckpt", b"W", durable=False, resumable=False)
    node.drain()
    done = command("clean", *where)
    assert done.exit_code == 0
    assert "removed 2.ckpt (step 2): 1 part" in done.stdout
    assert "removed 4 parts" in done.stdout
    assert not node.root.exists()


def test_clean_ends_a_sidecar_that_has_nothing_to_do(node):
    """As a DaemonSet runs it: it holds the drain's lock for ever. One that works on something is waited for first."""
    where = node.where
    op = node.save("1.ckpt", b"A")
    ours = [sys.executable, "-m", "tiered_checkpoint_io", "flush", "--stay", *where]
    with subprocess.Popen(ours, stderr=subprocess.PIPE, text=True) as sidecar:
        try:
            until(lambda: node.states() == {op: "committed"})
            trainer = try_lock(node.root / TRAINERS_FILE, shared=True)
            assert "a trainer or drain uses it" in str(command("clean", *where).exception)
            release(trainer)
            done = command("clean", *where)
            assert (done.exit_code, "removed 1.ckpt" in done.stdout, node.root.exists()) == (0, True, False), done
            assert (sidecar.wait(30), "error" in sidecar.stderr.read()) == (0, False)
        finally:
            sidecar.kill()


def test_clean_leaves_what_is_queued_in_the_last_moment(node, monkeypatch):
    node.save("1.ckpt", b"A")
    Drain(node.root).run()
    refuse, late = cleaning._refuse, []

    def and_then(*args, **options):
        refuse(*args, **options)
        late.append(node.save("2.ckpt", b"B"))

    monkeypatch.setattr(cleaning, "_refuse", and_then)
    where = node.where
    assert "something was queued just now" in str(command("clean", *where).exception)
    assert [each.op_id for each in node.queue.look(node.tier)] == late
    monkeypatch.undo()
    # What a killed command has put away goes with the next one.
    left = node.root.with_name(f".{node.root.name}.cleaned-0123")
    (left / "saves").mkdir(parents=True)
    another = try_lock(left / TRAINERS_FILE)
    assert "not yet durable" in str(command("clean", *where).exception)
    assert left.exists(), "another command is at work there"
    release(another)
    assert command("clean", *where, "--force").exit_code == 0
    assert not left.exists()
    assert not node.root.exists()


def test_clean_leaves_what_a_drain_works_on(node):
    node.save("1.ckpt", b"A")
    drain = try_lock(node.root / LOCK_FILE)
    assert "a trainer or drain uses it" in str(command("clean", *node.where).exception)
    assert not is_lost(drain)
    release(drain)


@pytest.mark.parametrize("folder", ["saves", "replicas"])
@pytest.mark.parametrize("why", ["format version 3 is not 1", "not JSON"])
def test_clean_keeps_what_it_can_not_read(node, memory_dir, folder, why):
    """It may wait for the durable tier, or be the newest: a newer release wrote it, or its description is damaged."""
    where = ("--memory-dir", memory_dir)
    node.save("1.ckpt", b"A")
    node.drain()
    node.save("2.ckpt", b"B")
    stored = next(each for each in node.tier.parts() if each.part.name == "2.ckpt")
    written = (stored.folder / "part.json").read_bytes()
    (stored.folder / "part.json").write_bytes(of_a_newer_release(written) if "version" in why else written[:-50])
    if folder == "replicas":
        (node.root / "replicas" / stored.save_id).mkdir()
        stored.folder.rename(node.root / "replicas" / stored.save_id / stored.folder.name)
    refused = command("clean", *where)
    assert isinstance(refused.exception, ConfigError)
    assert "a part can't be read: " in str(refused.exception)
    assert why in str(refused.exception)
    assert len([*node.root.glob("*/*/rank-00000/2.ckpt")]) == 1
    forced = command("clean", *where, "--force")
    assert (forced.exit_code, forced.stdout.count("could not be read"), "removed 2 parts" in forced.stdout) == (
        0,
        1,
        True,
    )


def test_clean_by_force_and_of_what_another_node_has_too(node, memory_dir):
    """Replicas are in memory as well: all nodes may be cleaned at once."""
    node.save("1.ckpt", b"A", durable=False)
    node.tier.mark_replicated(node.tier.parts()[0])
    assert "not on the durable tier" in str(command("clean", "--memory-dir", memory_dir).exception)
    forced = command("clean", "--memory-dir", memory_dir, "--force")
    assert (forced.exit_code, "removed 1.ckpt" in forced.stdout) == (0, True)


def test_clean_keeps_a_newest_checkpoint_whose_upload_is_not_complete(node, memory_dir):
    """Another node's drain is overwriting the name with it, and may die: then this replica is all that is left."""
    store = DirectoryStore(node.dirpath)
    committing.save(store, "a.ckpt", 1)
    committing.begin_overwrite(store, "a.ckpt", 2)
    part, files = full_part("a.ckpt", 2)
    node.tier.replicas.commit(replace(part, dirpath=node.dirpath), files)
    refused = command("clean", "--memory-dir", memory_dir)
    assert isinstance(refused.exception, ConfigError)
    assert "newest checkpoint a.ckpt (step 2) is not on the durable tier" in str(refused.exception)
    committing.save(store, "a.ckpt", 2)
    assert command("clean", "--memory-dir", memory_dir).exit_code == 0


def test_clean_leaves_all_where_it_can_not_ask(memory_dir):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        node = Node(memory_dir, "s3://bucket/run", endpoint_url=endpoint, durable_timeout_s=1)
        node.save("1.ckpt", b"A", durable=False)
        refused = command("clean", "--memory-dir", memory_dir)
    assert isinstance(refused.exception, ConfigError)
    assert "could not check whether its newest checkpoint 1.ckpt" in str(refused.exception)
    assert len(node.tier.parts()) == 1


def test_the_status_names_what_is_retried(memory_dir, monkeypatch):
    """For minutes, before it has failed."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    away = Node(memory_dir, "s3://bucket/run", endpoint_url=f"http://127.0.0.1:{free_port()}")
    saved, stop, bounds = away.save("a.ckpt", b"A"), threading.Event(), quick(retry_deadline_s=1.5, heartbeat_s=0.02)
    drain = Drain(away.root, stop=stop, open_store=functools.partial(open_store, clock=bounds), clock=bounds)
    thread = threading.Thread(target=drain.run)
    thread.start()
    try:
        shown, end = "", time.monotonic() + 10
        while "last error" not in shown and time.monotonic() < end:
            shown = command("status", "--memory-dir", memory_dir).stdout
        assert away.queue.outcome(saved) is None
    finally:
        stop.set()
        thread.join()
    assert "last error: S3 " in shown, shown
