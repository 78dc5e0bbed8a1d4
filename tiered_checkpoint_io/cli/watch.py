"""The command that watches a durable tier, and runs another for each checkpoint that becomes durable."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.documents import Change, Event
from tiered_checkpoint_io.cli.execute import CommandLine
from tiered_checkpoint_io.cli.listing import looker_of
from tiered_checkpoint_io.cli.options import SERVER, SHM, Dirpath, Json, MemoryDir, Server
from tiered_checkpoint_io.cli.output import is_terminal, printable, rich_table, say, write_json
from tiered_checkpoint_io.cli.rows import state_text, table_of
from tiered_checkpoint_io.engine.durable.pins import pin, unpin
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError, StoreUnavailableError
from tiered_checkpoint_io.inventory.look import Looker
from tiered_checkpoint_io.inventory.news import News
from tiered_checkpoint_io.inventory.record import CheckpointInfo, iso
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

if TYPE_CHECKING:
    from rich.live import Live

#: How often the tiers are looked at by default, seconds.
_EVERY_S = 5.0
#: When the pin of a command ends that did not live to remove it, seconds.
_PINNED_S = 24 * 3600


class _ToldToEnd(BaseException):
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
        float | None, typer.Option(min=0, help="End after so many seconds without a new durable checkpoint.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="How often to look, seconds.")] = _EVERY_S,
    memory_dir: MemoryDir = SHM,
    server: Server = SERVER,
    as_json: Json = False,
) -> None:
    """Watches both tiers: a table on a terminal, else a line for each change; until SIGTERM or Ctrl-C.

    With --exec CMD a shell runs CMD once for each checkpoint that becomes durable, in the order of the saves, one at a
    time. "$1" is its URL; TIERED_CKPT_URL, _NAME, _DIRPATH, _SAVE_ID, _STEP, _EPOCH, _KIND, _SIZE_BYTES, _CREATED,
    _METRIC_NAME and _METRIC_VALUE are in its environment, empty where they are not known. Where CMD fails, that is
    said, the next one follows, and the status is 1 at the end. Meanwhile the checkpoint is pinned: it is not deleted.
    """
    config = server.config(dirpath)
    if after is not None and command is None:
        raise typer.BadParameter("--after tells where --exec is to begin, and goes with it")
    if after and not ids.is_save_id(after):
        raise typer.BadParameter(f"--after {after!r} is no save id; --json and show have them")
    runs = CommandLine(command, as_json=as_json) if command is not None else None
    news, shown = News(after), _Shown(as_json=as_json)
    watched = _Watched(config, looker_of(config, memory_dir))
    with _ended_by_sigterm(), _output(config.dirpath, shown, table=runs is None and not as_json) as output:
        last = time.monotonic()
        while True:
            found = watched.look()
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


def _run(runs: CommandLine, config: TieredCheckpointConfig, each: CheckpointInfo) -> None:
    try:
        with _pinned(config, each.name):
            runs.run(each)
    except CheckpointNotFoundError:
        say(printable(f"{each.name} was deleted before its turn came: the command was not run for it"), err=True)


@contextlib.contextmanager
def _pinned(config: TieredCheckpointConfig, name: str) -> Iterator[None]:
    """A block in which retention does not delete a checkpoint; where it can't be pinned, that is said.

    Raises:
        CheckpointNotFoundError: It is deleted already.
    """
    token = None
    try:
        made = ask(config, lambda store: pin(store, name, reason="tiered-ckpt watch", expires_s=_PINNED_S))
        token = made.token
    except StoreError as error:
        say(printable(f"warning: {name} is not pinned, and may be deleted while the command runs: {error}"), err=True)
    try:
        yield
    finally:
        if token is not None:
            try:
                ask(config, lambda store: unpin(store, name, token))
            except StoreError as error:
                say(printable(f"warning: the pin of {name} stays, for a day at most: {error}"), err=True)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A block that SIGTERM ends: all that it waits for is waited for in the main thread."""

    def end(*_: object) -> None:
        raise _ToldToEnd

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _ToldToEnd:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


class _Watched:
    """The tiers, looked at again and again; a silent durable tier is said once, and asked again."""

    def __init__(self, config: TieredCheckpointConfig, looker: Looker) -> None:
        self._config = config
        self._looker = looker
        self._found: list[CheckpointInfo] | None = None
        self._said = ""

    def look(self) -> list[CheckpointInfo]:
        """All checkpoints.

        Raises:
            StoreError: The durable tier refuses, or is silent at the first look.
        """
        said = ""
        try:
            quiet = self._found is not None
            self._found = ask(self._config, self._looker.look, quiet=quiet).checkpoints
        except CheckpointNotFoundError:
            self._found, said = [], f"there is nothing at {self._config.dirpath} yet; waiting for the first checkpoint"
        except StoreUnavailableError as error:
            if self._found is None:
                raise
            said = f"{error}; asking again"
        if said and said != self._said:
            say(printable(said), err=True)
        self._said = said
        return self._found or []


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
            write_json("watch", Change(event, at, each))
            return
        step = f"step {each.step}" if each.step is not None else ""
        cells = (str(iso(at)), event, each.name, step, size_text(each.size_bytes), state_text(each))
        say("\t".join(map(printable, cells)))


class _Table:
    """A table on a terminal, drawn anew at each look."""

    def __init__(self, title: str, live: Live) -> None:
        self._title = title
        self._live = live

    def update(self, found: Sequence[CheckpointInfo]) -> None:
        columns, rows = table_of(found, datetime.now(timezone.utc))
        self._live.update(rich_table(self._title, rows, columns), refresh=True)
