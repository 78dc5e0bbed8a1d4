"""The command line as a process: statuses, output in a pipe and on a terminal, a silent server; and ``watch``."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
import typer
from support import processes
from support.documented import command
from support.draining import Node
from support.processes import PATIENCE_S
from support.waiting import until
from typer.testing import CliRunner

from tiered_checkpoint_io import __version__
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.model.manifest import Metric

KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
start = functools.partial(processes.start, env=KEYS)


@pytest.fixture
def dirpath(memory_dir, tmp_path):
    node = Node(memory_dir, str(tmp_path / "run[/b]"))
    node.save("c[/b].ckpt", b"C")
    node.drain()
    return node.dirpath


@pytest.fixture
def silent():
    """Yields a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server


def test_help_shows_each_summary_whole_and_readable_words():
    known = typer.main.get_command(app).commands
    shown = CliRunner().invoke(app, ["-h"]).stdout
    assert shown.startswith("Usage: ")
    assert "Exit status: 0 good" in shown
    assert [title for title in ("Look:", "Move:", "Delete, only with --yes:") if title not in shown] == []
    assert "..." not in shown.partition("Look:")[2]
    for name, each in known.items():
        one = CliRunner().invoke(app, [name, "-h"])
        assert one.exit_code == 0, (name, one.output)
        summary = " ".join(each.help.partition("\n\n")[0].split())
        assert summary in " ".join(shown.split()), name
        assert re.findall(r"--[a-z-]+ +(?:TEXT|INTEGER|FLOAT|<(?:str|int|float)>)", one.stdout) == []
    version = CliRunner().invoke(app, ["--version"])
    assert (version.exit_code, version.stdout) == (0, f"tiered-ckpt {__version__}\n")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_by_name(platform, tmp_path):
    code = f"""
import sys, typer
sys.platform = {platform!r}
sys.modules["fcntl"] = None
from tiered_checkpoint_io import entry_points
assert entry_points.for_lightning() == [], "trainers without us go on"
for name in ("find_latest", "new_checkpoints"):
    try:
        getattr(sys.modules["tiered_checkpoint_io"], name)
    except ImportError as error:
        assert "runs on Linux only" in str(error), error
    else:
        raise AssertionError(name)
import tiered_checkpoint_io.cli
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: tiered_checkpoint_io runs on Linux only; this is {platform}"


def watch(node, run, after=""):
    return command("watch", node.dirpath, "--exec", run, "--after", after, "--idle-timeout", "0")


def test_a_command_runs_once_for_each_in_order_and_a_failure_is_reported_at_the_end(node, tmp_path, capfd):
    for number, name in enumerate(("z 'odd'.ckpt", "a.ckpt"), 1):
        save = node.save(name, b"A", epoch=7, metric=Metric("val_loss", 0.5), created=float(number))
    node.alias("last.ckpt", "a.ckpt")
    node.drain()
    node.save("memory.ckpt", b"A", durable=False)
    said = 'echo "$1|$TIERED_CKPT_NAME|$TIERED_CKPT_STEP|$TIERED_CKPT_EPOCH|$TIERED_CKPT_METRIC_VALUE"; test $TIERED_CKPT_STEP != 1'
    done = watch(node, said)
    assert capfd.readouterr().out.splitlines() == [
        f"{node.dirpath}/z 'odd'.ckpt|z 'odd'.ckpt|1|7|0.5",
        f"{node.dirpath}/a.ckpt|a.ckpt|2|7|0.5",
    ]
    assert done.exit_code == 1
    assert "error: the command for z 'odd'.ckpt ended with status 1" in done.stderr
    # Begun again behind the last one, there is nothing new.
    assert (watch(node, "false", after=save).exit_code, capfd.readouterr().out) == (0, "")
    assert command("watch", node.dirpath, "--after", "step 5").exit_code == 2


def test_a_command_is_not_run_for_what_was_overwritten_before_its_turn(node, tmp_path, capfd):
    """Its variables would have the step of one checkpoint, and the URL of another."""
    for name in ("first.ckpt", "last.ckpt"):
        node.save(name, b"A")
    node.drain()
    node.save("last.ckpt", b"B")
    upload = f"{sys.executable} -m tiered_checkpoint_io flush {' '.join(node.where)} > /dev/null"
    done = watch(node, f"echo $TIERED_CKPT_NAME $TIERED_CKPT_STEP; {upload}")
    assert capfd.readouterr().out.splitlines() == ["first.ckpt 1"]
    assert (done.exit_code, done.stderr) == (
        0,
        "warning: last.ckpt was deleted or overwritten before its turn came, and is left out\n",
    )
    # At the next look it is what it is by then.
    assert (watch(node, "echo $TIERED_CKPT_STEP").exit_code, capfd.readouterr().out) == (0, "1\n3\n")


def watching(node, *arguments, **options):
    return processes.start("watch", node.dirpath, "--every", "0.1", *arguments, **options)


def test_sigterm_ends_it_with_the_command_and_all_that_that_started(node, tmp_path):
    """The dirpath comes into being only while it is watched."""
    pids = tmp_path / "pids"
    process = watching(node, "--exec", f"sleep 1000 & echo $! > {pids}.new; mv {pids}.new {pids}; wait")
    try:
        assert "waiting for the first checkpoint" in process.stderr.readline()
        node.save("1.ckpt", b"A")
        node.drain()
        until(pids.exists)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (0, "")
    header, first = (line.split("\t") for line in out.splitlines()[:2])
    assert (header[:3], first[1:3]) == (["time", "event", "name"], ["new", "1.ckpt"])
    until(lambda: not os.path.exists(f"/proc/{int(pids.read_text())}"))
