"""The command that watches a durable tier, and runs another for each checkpoint that becomes durable."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Literal

import typer

from tiered_checkpoint_io.cli.answers import ask, raising
from tiered_checkpoint_io.cli.listing import looker_of, state_text
from tiered_checkpoint_io.cli.options import Dirpath, Memory, Output, Server
from tiered_checkpoint_io.cli.output import Columns, row_writer, say, write_json
from tiered_checkpoint_io.inventory.api import NewCheckpoints, held
from tiered_checkpoint_io.inventory.rows import CheckpointInfo, RepeatedLook, iso
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: Time for a command to end after SIGTERM before it is killed, seconds: a container is mostly killed after ten.
_GRACE_S = 5.0
_STDERR = 2
_PREFIX = "TIERED_CKPT_"


class _Terminated(BaseException):
    """SIGTERM came."""


@dataclass(frozen=True, kw_only=True)
class Watch(Output, Server, Memory):
    """Watches both tiers until SIGTERM or Ctrl-C; runs a command for each durable checkpoint by --exec.

    Shows a line for each change.

    With --exec CMD a shell runs CMD once for each checkpoint that becomes durable, in the order of the saves, one at a
    time. "$1" is its URL; TIERED_CKPT_URL, _NAME, _DIRPATH, _SAVE_ID, _STEP, _EPOCH, _KIND, _SIZE_BYTES, _CREATED,
    _METRIC_NAME and _METRIC_VALUE are in its environment, empty if they are not known. If CMD fails, that is said, the
    next one follows, and the status is 1 at the end. Meanwhile nothing deletes the checkpoint.
    """

    dirpath: Dirpath
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run by a shell, once for each checkpoint that becomes durable."),
    ] = None
    after: Annotated[
        str | None,
        typer.Option(metavar="SAVE_ID", help="With --exec: begin after this save; '' for all that is there."),
    ] = None
    idle_timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="End after this time without a new durable checkpoint."),
    ] = None
    every: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two looks.")] = 5.0

    def run(self) -> None:
        """Shows changes and runs the command until the end; the status is 1 if the command failed."""
        config = self.config(self.dirpath)
        if self.after is not None and self.command is None:
            raise typer.BadParameter("--after needs --exec: it says where that begins")
        if self.after and not ids.is_save_id(self.after):
            raise typer.BadParameter(f"--after {self.after!r} is no save id; tiered-ckpt ls DIRPATH NAME prints them")
        runs = _CommandLine(self.command, as_json=self.as_json) if self.command is not None else None
        news, looker = NewCheckpoints(self.after), looker_of(config, self)
        look = RepeatedLook(lambda: ask(config, looker.look, quiet=look.has_answered), lambda line: say(line, err=True))
        # Raised while this waits, which is in the main thread only.
        ended = contextlib.suppress(_Terminated)
        update = _lines(self.as_json)
        with ended, raising(_Terminated):
            last = time.monotonic()
            while True:
                found = look.checkpoints()
                update(found)
                for each in news.of(found):
                    if runs is not None:
                        _run(runs, config, each)
                    last = time.monotonic()
                idle = self.idle_timeout
                left = self.every if idle is None else min(self.every, last + idle - time.monotonic())
                if left <= 0:
                    break
                time.sleep(left)
        raise typer.Exit(1 if runs is not None and runs.failed else 0)


def _run(runs: _CommandLine, config: TieredCheckpointConfig, each: CheckpointInfo) -> None:
    def warn(line: str) -> None:
        say(f"warning: {line}", err=True)

    with held(each, functools.partial(ask, config), warn) as is_there:
        if is_there:
            runs.run(each)
            return
    # If it was overwritten, the new checkpoint has a turn of its own.
    why = "was deleted or overwritten before its turn came: the command was not run for it"
    say(f"{each.name} {why}", err=True)


# --------------------------------------------------------------------------------------- command
class _CommandLine:
    """A command for a shell, run for one checkpoint at a time.

    Attributes:
        failed: Number of failures.
    """

    def __init__(self, command: str, *, as_json: bool) -> None:
        """Takes the command; with ``as_json`` its output goes to stderr, and its outcome to stdout."""
        self._command = command
        self._as_json = as_json
        self.failed = 0

    def run(self, each: CheckpointInfo) -> None:
        """Runs the command, and waits for its end; an interrupt ends the command and its children."""
        began = time.monotonic()
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._command, "tiered-ckpt", each.url],
            env={**os.environ, **_variables(each)},
            stdin=subprocess.DEVNULL,
            stdout=_STDERR if self._as_json else None,
            # Ctrl-C at a terminal is for this process, which ends the command.
            start_new_session=True,
        )
        try:
            status = process.wait()
        except BaseException:
            _end(process)
            raise
        if status:
            self.failed += 1
            how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
            say(f"error: the command for {each.name} {how}", err=True)
        if self._as_json:
            lasted = round(time.monotonic() - began, 3)
            write_json("watch", Ran("ran", datetime.now(timezone.utc), each, status, lasted))


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
_Update = Callable[[Sequence[CheckpointInfo]], None]


@dataclass(frozen=True)
class Change:
    """A change that a look found, or the end of a command."""

    event: Literal["listed", "new", "changed", "removed", "ran"]
    time: datetime
    checkpoint: CheckpointInfo


@dataclass(frozen=True)
class Ran(Change):
    """The end of a command."""

    exit_status: int
    duration_s: float


def _lines(as_json: bool) -> _Update:
    """Returns a function that prints a line, or a JSON document, for each change since the last look."""
    before: dict[tuple[str, str], CheckpointInfo] | None = None
    write = row_writer(_COLUMNS)

    def update(found: Sequence[CheckpointInfo]) -> None:
        nonlocal before
        now = {(each.name, each.save_id): each for each in found}
        known = before or {}
        # The oldest first, as in a log.
        for key, each in reversed(now.items()):
            if before is None:
                tell("listed", each)
            elif key not in known:
                tell("new", each)
            elif known[key].state != each.state:
                tell("changed", each)
        for key in known.keys() - now.keys():
            tell("removed", known[key])
        before = now

    def tell(event: Literal["listed", "new", "changed", "removed"], each: CheckpointInfo) -> None:
        change = Change(event, datetime.now(timezone.utc), each)
        if as_json:
            write_json("watch", change)
        else:
            write(change)

    return update


_COLUMNS: Columns = {
    "time": lambda each: iso(each.time),
    "event": "event",
    "name": lambda each: each.checkpoint.name,
    "step": lambda each: each.checkpoint.step,
    "size": lambda each: size_text(each.checkpoint.size_bytes),
    "state": lambda each: state_text(each.checkpoint),
}
