"""The drain as the process that a trainer starts, and as a thread of it; which code that process runs."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from support.draining import Node, names, readable
from support.story import op_id
from support.waiting import until

import tiered_checkpoint_io
from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.engine.durable.commit import is_sent
from tiered_checkpoint_io.memory.node import is_locked, release, try_lock


def test_the_drain_is_light():
    """A drain imports neither torch nor Lightning, boto3 only for S3, a trainer's no commands, and starts quickly."""
    code = (
        "import sys, tiered_checkpoint_io.__main__, tiered_checkpoint_io.engine.drain.process\n"
        "commands = {'typer', 'pydantic', 'rich', 'tiered_checkpoint_io.cli'} & set(sys.modules)\n"
        "assert not commands, commands\n"
        "import tiered_checkpoint_io.cli\n"
        "heavy = {'torch', 'lightning', 'omegaconf', 'hydra', 'boto3', 'fsspec', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    # The time that it takes the processor, which other work on this machine does not change much.
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 3.0


def test_a_trainer_starts_it_waits_for_it_and_leaves_it(node, store, handle_of):
    handle = handle_of(node)
    first = node.save("a.ckpt", b"A" * 100_000)
    handle.start()
    outcome = handle.wait(first, 60)
    assert (outcome.state, outcome.step, outcome.bytes) == ("committed", 1, 100_000)
    assert readable(store, "a.ckpt") == b"A" * 100_000
    pid = handle.progress().pid
    # Slurm sends these signals to all processes of a step.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.kill(pid, number)
    handle.submit(request := next_request(node, "delete", "a.ckpt"))
    handle.flush(60)
    assert names(store) == []
    # An outcome that was waited for is not reported again.
    assert [outcome.op_id for outcome in handle.news()[0]] == [request.op_id]
    assert handle.news() == ([], "")
    assert handle.progress().pid == pid != os.getpid()
    assert os.getsid(pid) == pid
    # Training has the cores; sessions may be weighed before processes are.
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + 10)
    autogroup = Path(f"/proc/{pid}/autogroup")
    if autogroup.exists():
        assert autogroup.read_text().split()[-1] == str(min(19, os.nice(0) + 10))
    handle.close(timeout_s=30)
    until(lambda: not is_locked(node.root / LOCK_FILE), "the drain leaves with its trainer")


def next_request(node, action, name):
    node.number += 1
    return Request(op_id(node.number), action, name, node.dirpath)


def is_over(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    return True


def test_a_trainer_that_starts_gets_a_drain_of_its_own_which_goes_on_with_the_work(node, store, handle_of):
    """The one before still waits for the part of another node."""
    before = handle_of(node)
    before.start()
    op = node.part("a", 1, 0, series="")
    until(lambda: is_sent(node.queue.journal(op)), "it has sent its part")
    old, same = before.progress().pid, handle_of(node)
    same.start()
    is_asked = node.queue.is_asked_to_leave(node.queue.announced())
    same.close(timeout_s=0)
    assert not is_asked, "a further rank of the same job takes the drain that there is"
    before.close(timeout_s=0)
    assert is_locked(node.root / LOCK_FILE), "it outlives its trainer"
    now = handle_of(node)
    now.start()
    until(lambda: now.progress().pid not in (0, old), "the new one works")
    until(lambda: is_over(old), "the old one leaves")
    node.part("a", 1, 1, series="")
    assert now.wait(op, 60).state == "committed"


def test_backpressure_is_bounded(memory_dir, tmp_path, handle_of, caplog):
    """Without a drain, saves queue up to the bound. Training waits for the bound once, and continues."""
    node = Node(memory_dir, str(tmp_path / "durable"), pending_timeout_s=1)
    handle = handle_of(node)
    lock = try_lock(node.root / LOCK_FILE)
    node.save("a.ckpt", b"A")
    assert handle.has_room(op_id(90))
    node.save("b.ckpt", b"B")
    started = time.monotonic()
    assert not handle.has_room(op_id(91))
    assert time.monotonic() - started >= 1
    assert not handle.has_room(op_id(92))
    assert "training waited" not in caplog.text, "no upload has ended"
    # A save that fails is given up for a new one, but the drain may be held up, and the bound holds.
    for number in (1, 2):
        node.queue.finish(Outcome(op_id(number), "save", "x", number, "failed", "no"), final=False)
    for number in (3, 4):
        assert handle.has_room(op_id(90 + number))
        assert [request.target for request in node.queue.requests()][-1] == op_id(number - 2)
        node.save(f"{number}.ckpt", b"C")
    assert not handle.has_room(op_id(95))
    assert len(handle.pending_saves()) == 4
    release(lock)


PACKAGE = Path(tiered_checkpoint_io.__file__).parent
TRAINER = """
import logging, os, pathlib, sys
sys.path.append(sys.argv[1])
sys.path.insert(0, os.path.abspath("first"))
from tiered_checkpoint_io.engine.drain.process import start_process
os.chdir("/")
sys.exit(start_process(pathlib.Path(sys.argv[2]), logging.getLogger()).wait(60))
"""


@pytest.fixture
def copy(tmp_path):
    """Copies the package to a folder of this name, as a clone or an installation elsewhere has it."""

    def make(name):
        place = tmp_path / name
        shutil.copytree(PACKAGE, place / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        return place

    return make


def python(code, *arguments, cwd):
    """Returns the output of code, in a process that finds the package by its arguments, or as installed."""
    command = [sys.executable, "-I", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("is_zipped", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_the_drain_runs_the_code_of_its_trainer_and_of_no_other_installation(copy, tmp_path, memory_dir, is_zipped):
    node, place = Node(memory_dir, str(tmp_path / "durable")), copy("clone")
    with (place / PACKAGE.name / "engine/drain/process.py").open("a") as file:
        file.write('\n\ndef main() -> None:\n    print("this is", __file__, sys.argv[-1])\n')
    # Neither a folder that comes last nor one that was put first, later, hides anything of the standard library.
    (tmp_path / "first").mkdir()
    (tmp_path / "first/logging.py").write_text("raise SystemExit('not the one of the standard library')")
    (place / "threading.py").write_text("raise SystemExit('not the one of the standard library')")
    if is_zipped:
        archive = tmp_path / "app.pyz"
        with zipfile.ZipFile(archive, "w") as file:
            for path in place.rglob("*.py"):
                file.write(path, path.relative_to(place))
        place = archive
    # A relative path, as in a notebook, which then changes its folder.
    python(TRAINER, place.name, node.root, cwd=tmp_path)
    standalone = place / PACKAGE.name / "engine/drain/process.py"
    assert (node.root / "status/drain.log").read_text() == f"this is {standalone} {node.root}\n"
