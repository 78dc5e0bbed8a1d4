"""The command that watches a durable tier, and runs another for each checkpoint that becomes durable."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import typer

from tiered_checkpoint_io.cli.answers import ask, raising
from tiered_checkpoint_io.cli.listing import looker_of, state_text, table_of
from tiered_checkpoint_io.cli.options import SERVER, SHM, Dirpath, Json, MemoryDir, Server
from tiered_checkpoint_io.cli.output import is_terminal, printable, rich_table, row_writer, say, write_json
from tiered_checkpoint_io.inventory.api import NewCheckpoints, held
from tiered_checkpoint_io.inventory.rows import CheckpointInfo, RepeatedLook, iso
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

if TYPE_CHECKING:
    from rich.live import Live

#: How often the tiers are looked at by default, seconds.
_EVERY_S = 5.0
#: How long a command has to end after SIGTERM, before it is killed, seconds: a container is killed after ten, mostly.
_GRACE_S = 5.0
_STDERR = 2
_PREFIX = "TIERED_CKPT_"


Event = Literal["listed", "new", "changed", "removed"]


class _Terminated(BaseException):
    """SIGTERM came."""


def watch(
    dirpath: Dirpath,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run by a shell, once for each checkpoint that becomes durable."),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="SAVE_ID", help="With --exec: begin after this save; '' for all that is there."),
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="End after this time without a new durable checkpoint."),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two looks.")
    ] = _EVERY_S,
    memory_dir: MemoryDir = SHM,
    server: Server = SERVER,
    as_json: Json = False,
) -> None:
    """Watches both tiers until SIGTERM or Ctrl-C; runs a command for each durable checkpoint by --exec.

    Shows a table on a terminal, else a line for each change.

    With --exec CMD a shell runs CMD once for each checkpoint that becomes durable, in the order of the saves, one at a
    time. "$1" is its URL; TIERED_CKPT_URL, _NAME, _DIRPATH, _SAVE_ID, _STEP, _EPOCH, _KIND, _SIZE_BYTES, _CREATED,
    _METRIC_NAME and _METRIC_VALUE are in its environment, empty where they are not known. Where CMD fails, that is
    said, the next one follows, and the status is 1 at the end. Meanwhile nothing deletes the checkpoint.
    """
    config = server.config(dirpath)
    if after is not None and command is None:
        raise typer.BadParameter("--after needs --exec: it says where that begins")
    if after and not ids.is_save_id(after):
        raise typer.BadParameter(f"--after {after!r} is no save id; tiered-ckpt ls DIRPATH NAME prints them")
    runs = _CommandLine(command, as_json=as_json) if command is not None else None
    news, shown = NewCheckpoints(after), _Shown(as_json=as_json)
    looker = looker_of(config, memory_dir)
    look = RepeatedLook(
        lambda: ask(config, looker.look, quiet=look.has_answered), lambda line: say(printable(line), err=True)
    )
    # Raised where this waits, which is in the main thread alone.
    ended = contextlib.suppress(_Terminated)
    with ended, raising(_Terminated), _output(config.dirpath, shown, table=runs is None and not as_json) as output:
        last = time.monotonic()
        while True:
            found = look.checkpoints()
            output.update(found)
            for each in news.of(found):
                if runs is not None:
                    _run(runs, config, each)
                last = time.monotonic()
            left = every if idle_timeout is None else min(every, last + idle_timeout - time.monotonic())
            if left <= 0:
                break
            time.sleep(left)
    raise typer.Exit(1 if runs is not None and runs.failed else 0)


def _run(runs: _CommandLine, config: TieredCheckpointConfig, each: CheckpointInfo) -> None:
    def warn(line: str) -> None:
        say(printable(f"warning: {line}"), err=True)

    with held(each, functools.partial(ask, config), warn) as is_there:
        if is_there:
            runs.run(each)
            return
    # If it was overwritten, what it is now has a turn of its own.
    why = "was deleted or overwritten before its turn came: the command was not run for it"
    say(printable(f"{each.name} {why}"), err=True)


# --------------------------------------------------------------------------------------- command
class _CommandLine:
    """A command for a shell, run for one checkpoint at a time.

    Attributes:
        failed: How often it failed.
    """

    def __init__(self, command: str, *, as_json: bool) -> None:
        """Takes the command; with ``as_json`` its output goes to stderr, and what became of it to stdout."""
        self._command = command
        self._as_json = as_json
        self.failed = 0

    def run(self, each: CheckpointInfo) -> None:
        """Runs it, and waits for its end; where this is interrupted, the command and what it started are ended."""
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
            say(printable(f"error: the command for {each.name} {how}"), err=True)
        if self._as_json:
            lasted = round(time.monotonic() - began, 3)
            document = {
                "event": "ran",
                "time": datetime.now(timezone.utc),
                "checkpoint": each,
                "exit_status": status,
                "duration_s": lasted,
            }
            write_json("watch", document)


def _variables(each: CheckpointInfo) -> dict[str, str]:
    """What a command finds in its environment of a checkpoint; "" for what is not known."""
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
class _Output(Protocol):
    def update(self, found: Sequence[CheckpointInfo]) -> None:
        """Shows what a look found."""
        ...


@contextlib.contextmanager
def _output(title: str, shown: _Shown, *, table: bool) -> Iterator[_Output]:
    if not (table and is_terminal()):
        yield shown
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        yield _Table(title, live)


class _Shown:
    """A line, or a JSON document, for each change."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._before: dict[tuple[str, str], CheckpointInfo] | None = None
        self._write = row_writer(time=0, event=0, name=0, step=0, size=0, state=0)

    def update(self, found: Sequence[CheckpointInfo]) -> None:
        now = {(each.name, each.save_id): each for each in found}
        before = self._before or {}
        # The oldest first, as in a log.
        for key, each in reversed(now.items()):
            if self._before is None:
                self._say("listed", each)
            elif key not in before:
                self._say("new", each)
            elif before[key].state != each.state:
                self._say("changed", each)
        for key in before.keys() - now.keys():
            self._say("removed", before[key])
        self._before = now

    def _say(self, event: Event, each: CheckpointInfo) -> None:
        at = datetime.now(timezone.utc)
        if self._as_json:
            write_json("watch", {"event": event, "time": at, "checkpoint": each})
            return
        step = str(each.step) if each.step is not None else ""
        self._write(str(iso(at)), event, each.name, step, size_text(each.size_bytes), state_text(each))


class _Table:
    """A table on a terminal, drawn anew at each look."""

    def __init__(self, title: str, live: Live) -> None:
        self._title = title
        self._live = live

    def update(self, found: Sequence[CheckpointInfo]) -> None:
        columns, rows = table_of(found, datetime.now(timezone.utc))
        self._live.update(rich_table(self._title, rows, columns), refresh=True)
