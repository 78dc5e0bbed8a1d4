"""``watch``: a command for each checkpoint that becomes durable, a table on a terminal, and how it ends."""

import os
import pty
import signal
import sys

from support import processes
from support.documented import command
from support.processes import PATIENCE_S
from support.waiting import until

from tiered_checkpoint_io.model.manifest import Metric


def watch(node, memory_dir, run, after="", **options):
    more = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    line = ["watch", node.dirpath, "--memory-dir", memory_dir, "--exec", run, "--after", after, *more]
    return command(*line, "--idle-timeout", "0")


def test_a_command_runs_once_for_each_in_order_and_a_failure_is_told_at_the_end(node, memory_dir, tmp_path, capfd):
    for number, name in enumerate(("z 'odd'.ckpt", "a.ckpt"), 1):
        save = node.save(name, b"A", epoch=7, metric=Metric("val_loss", 0.5), created=float(number))
    node.alias("last.ckpt", "a.ckpt")
    node.drain()
    node.save("memory.ckpt", b"A", durable=False)
    said = 'echo "$1|$TIERED_CKPT_NAME|$TIERED_CKPT_STEP|$TIERED_CKPT_EPOCH|$TIERED_CKPT_METRIC_VALUE"; test $TIERED_CKPT_STEP != 1'
    done = watch(node, memory_dir, said)
    assert capfd.readouterr().out.splitlines() == [
        f"{node.dirpath}/z 'odd'.ckpt|z 'odd'.ckpt|1|7|0.5",
        f"{node.dirpath}/a.ckpt|a.ckpt|2|7|0.5",
    ]
    assert done.exit_code == 1
    assert "error: the command for z 'odd'.ckpt ended with status 1" in done.stderr
    # Begun again behind the last one, there is nothing new.
    assert (watch(node, memory_dir, "false", after=save).exit_code, capfd.readouterr().out) == (0, "")
    for wrong in (["--after", save], ["--exec", "true", "--after", "step 5"]):
        assert command("watch", node.dirpath, *wrong).exit_code == 2


def test_what_a_command_reads_is_held_meanwhile(node, memory_dir, tmp_path, capfd):
    for name in ("a.ckpt", "b.ckpt"):
        node.save(name, b"A")
    node.drain()
    # The first command tries to delete what it reads.
    delete = f"{sys.executable} -m tiered_checkpoint_io prune --keep-latest 1 --yes {node.dirpath}"
    holds = f"ls {node.dirpath}/.tiered/holds"
    done = watch(node, memory_dir, f"{holds}; test $TIERED_CKPT_NAME = b.ckpt || {delete} > {tmp_path}/said")
    assert capfd.readouterr().out.split() == ["a.ckpt", "b.ckpt"]
    assert done.exit_code == 0
    assert "in use" in (tmp_path / "said").read_text()
    assert sorted(os.listdir(node.dirpath)) == [".tiered", "a.ckpt", "b.ckpt"]
    assert not [each for each in (tmp_path / "run/.tiered/holds").rglob("*") if each.is_file()]


def test_a_command_is_not_run_for_what_was_overwritten_before_its_turn(node, memory_dir, tmp_path, capfd):
    """Its variables would have the step of one checkpoint, and the URL of another."""
    for name in ("first.ckpt", "last.ckpt"):
        node.save(name, b"A")
    node.drain()
    node.save("last.ckpt", b"B")
    upload = f"{sys.executable} -m tiered_checkpoint_io flush {' '.join(node.where)} > /dev/null"
    done = watch(node, memory_dir, f"echo $TIERED_CKPT_NAME $TIERED_CKPT_STEP; {upload}")
    assert capfd.readouterr().out.splitlines() == ["first.ckpt 1"]
    assert (done.exit_code, done.stderr) == (
        0,
        "last.ckpt was deleted or overwritten before its turn came: the command was not run for it\n",
    )
    # At the next look it is what it is by then.
    assert (watch(node, memory_dir, "echo $TIERED_CKPT_STEP").exit_code, capfd.readouterr().out) == (0, "1\n3\n")


def start(node, memory_dir, *arguments, **options):
    return processes.start("watch", node.dirpath, "--memory-dir", memory_dir, "--every", "0.1", *arguments, **options)


def test_sigterm_ends_it_with_the_command_and_all_that_that_started(node, memory_dir, tmp_path):
    """The dirpath comes into being only while it is watched."""
    pids = tmp_path / "pids"
    process = start(node, memory_dir, "--exec", f"sleep 1000 & echo $! > {pids}.new; mv {pids}.new {pids}; wait")
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
    # When it is looked at, it waits for its upload, or is durable already.
    header, first = (line.split("\t") for line in out.splitlines()[:2])
    assert (header[:3], first[1:3]) == (["time", "event", "name"], ["new", "1.ckpt"])
    until(lambda: not os.path.exists(f"/proc/{int(pids.read_text())}"))


def test_on_a_terminal_it_is_a_table_until_ctrl_c(node, memory_dir):
    node.save("[/b]1.ckpt", b"A")
    main, terminal = pty.openpty()
    process = start(node, memory_dir, stdout=terminal, env={"COLUMNS": "120", "TERM": "xterm"})
    os.close(terminal)
    try:
        shown = ""
        while "waiting" not in shown:
            shown += os.read(main, 1 << 16).decode()
        node.drain()
        while "durable" not in shown:
            shown += os.read(main, 1 << 16).decode()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert "[/b]1.ckpt" in shown
    assert "\t" not in shown
