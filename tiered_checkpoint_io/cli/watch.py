"""The command that shows each checkpoint that becomes durable, or runs another command for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Literal

import typer

from tiered_checkpoint_io.cli.options import Address, Dirpath, Output
from tiered_checkpoint_io.cli.output import TERMINATED, Columns, row_writer, say, write_json
from tiered_checkpoint_io.inventory.api import NewCheckpoints
from tiered_checkpoint_io.inventory.rows import CheckpointInfo, Tiers, iso
from tiered_checkpoint_io.model import ids

#: Time for a command to end after SIGTERM before it is killed, seconds: a container is mostly killed after ten.
_GRACE_S = 5.0
_STDERR = 2
_PREFIX = "TIERED_CKPT_"


@dataclass(frozen=True, kw_only=True)
class Watch(Output, Address):
    """Shows each checkpoint that becomes durable, until SIGTERM or Ctrl-C; runs a command for it by --exec.

    Each comes once, in the order of the saves, one at a time; meanwhile nothing deletes it.

    With --exec CMD a shell runs CMD for it. "$1" is its URL; TIERED_CKPT_URL, _NAME, _DIRPATH, _SAVE_ID, _STEP, _EPOCH,
    _KIND, _SIZE_BYTES, _CREATED, _METRIC_NAME and _METRIC_VALUE are in its environment, empty if they are not known. If
    CMD fails, that is said, the next one follows, and the status is 1 at the end.
    """

    dirpath: Dirpath
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run by a shell, once for each checkpoint that becomes durable."),
    ] = None
    after: Annotated[
        str | None,
        typer.Option(metavar="SAVE_ID", help="Begin after this save; '' for all that is there."),
    ] = None
    idle_timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="End after this time without a new durable checkpoint."),
    ] = None
    every: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two looks.")] = 5.0

    def run(self) -> None:
        """Shows the checkpoints and runs the command until the end; the status is 1 if the command failed."""
        if self.after and not ids.is_save_id(self.after):
            raise typer.BadParameter(f"--after {self.after!r} is no save id; tiered-ckpt ls DIRPATH NAME prints them")
        tiers, write = Tiers(self.config(self.dirpath)), row_writer(_COLUMNS, 24, 5, 40, 8, 10)
        news = NewCheckpoints(tiers, self.after, lambda line: say(f"warning: {line}", err=True))
        failed = 0
        try:
            with contextlib.closing(news.each(self.every, self.idle_timeout, threading.Event())) as found:
                for each in found:
                    if self.as_json:
                        _write("new", each)
                    else:
                        write(each)
                    failed += self.command is not None and _run(self.command, each, as_json=self.as_json) != 0
        except SystemExit as end:
            # SIGTERM is its regular end.
            if end.code != TERMINATED:
                raise
        raise typer.Exit(1 if failed else 0)


# --------------------------------------------------------------------------------------- command
def _run(command: str, each: CheckpointInfo, *, as_json: bool) -> int:
    """Runs a command for a checkpoint, and waits for its end; an interrupt ends the command and its children.

    With ``as_json`` its output goes to stderr, and its outcome to stdout. Returns its status.
    """
    began, process = time.monotonic(), None
    try:
        # A signal during the start would leave the command running.
        with _deferring():
            process = subprocess.Popen(
                ["/bin/sh", "-c", command, "tiered-ckpt", each.url],
                env={**os.environ, **_variables(each)},
                stdin=subprocess.DEVNULL,
                stdout=_STDERR if as_json else None,
                # Ctrl-C at a terminal is for this process, which ends the command.
                start_new_session=True,
            )
        status = process.wait()
    except BaseException:
        if process is not None:
            _end(process)
        raise
    if status:
        how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
        say(f"error: the command for {each.name} {how}", err=True)
    if as_json:
        _write("ran", each, status, round(time.monotonic() - began, 3))
    return status


@contextlib.contextmanager
def _deferring() -> Iterator[None]:
    """Holds SIGTERM and Ctrl-C back until the end of the block, such as while a process is started."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


def _variables(each: CheckpointInfo) -> dict[str, str]:
    """Returns a command's environment variables for a checkpoint; the value of an unknown fact is ""."""
    facts = {
        "URL": each.url,
        "NAME": each.name,
        "DIRPATH": each.dirpath,
        "SAVE_ID": each.save_id,
        "STEP": each.step,
        "EPOCH": each.epoch,
        "KIND": each.kind,
        "SIZE_BYTES": each.size_bytes,
        "CREATED": iso(each.created),
        "METRIC_NAME": each.metric.monitor if each.metric is not None else None,
        "METRIC_VALUE": repr(each.metric.value) if each.metric is not None else None,
    }
    return {_PREFIX + what: "" if value is None else str(value) for what, value in facts.items()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command with all that it started, within ``_GRACE_S``."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---------------------------------------------------------------------------------------- output
def _write(
    event: Literal["new", "ran"], each: CheckpointInfo, exit_status: int | None = None, duration_s: float | None = None
) -> None:
    """Prints a checkpoint that has become durable, or the end of a command for it, for programs."""
    row = {"event": event, "time": datetime.now(timezone.utc), "checkpoint": each}
    write_json("watch", {**row, "exit_status": exit_status, "duration_s": duration_s})


_COLUMNS: Columns = {
    "time": lambda _: iso(datetime.now(timezone.utc)),
    "event": lambda _: "new",
    "name": "name",
    "step": "step",
    "size": "size_bytes",
}
