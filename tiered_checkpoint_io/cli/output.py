"""The output of commands: tables and progress on a terminal, tabs in a pipe, and JSON for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiered_checkpoint_io.inventory.rows import iso
from tiered_checkpoint_io.logs import size_text

if TYPE_CHECKING:
    from rich.table import Table

#: As a shell has them for a process that a signal has ended.
INTERRUPTED, READER_GONE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
#: Raised when a key of a document changes its meaning or goes; keys that are added leave it.
JSON_VERSION = 1
#: On a terminal of so many columns, cells of so many characters, and names of so many, are not folded.
_WIDE, _SHORT, _NAME = 100, 11, 30
#: Between two lines of progress in a pipe, seconds.
EVERY_S = 5.0


#: Prints a line above what moves on the terminal, while something does.
_above: Callable[[str], None] | None = None


@contextlib.contextmanager
def lines_above(printed: Callable[[str], None]) -> Iterator[None]:
    """A block in which the bottom of the terminal moves, so that lines go above it."""
    global _above
    before, _above = _above, printed
    try:
        yield
    finally:
        _above = before


def leave_terminal() -> None:
    """Shows the cursor again, where the process leaves while something still moves."""
    if _above is not None and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")


def say(text: str, *, err: bool = False) -> None:
    """Prints a line.

    Raises:
        SystemExit: What reads the output has ended; nothing more is printed.
    """
    try:
        if _above is not None and (sys.stderr if err else sys.stdout).isatty():
            _above(text)
        else:
            typer.echo(text, err=err)
    except BrokenPipeError:
        # What is still buffered has somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())
        raise SystemExit(READER_GONE) from None


def write_json(command: str, document: object) -> None:
    """Prints the answer of a command, a mapping or a dataclass, as the one JSON document on stdout."""
    say(json.dumps({"version": JSON_VERSION, "command": command, **as_json(document)}, allow_nan=False))


def as_json(value: Any) -> Any:
    """The same for JSON: times as ISO 8601 (UTC), and null where a number is not finite."""
    if is_dataclass(value):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value) if each.repr}
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(title: str, rows: Iterable[tuple[str, ...]], *columns: str) -> None:
    """Prints a table: for people on a terminal, else the columns' names and the rows, separated by tabs."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not is_terminal():
        # Names are never cut or folded here.
        say("\n".join("\t".join(line) for line in [columns, *cells]))
        return
    from rich.console import Console

    Console().print(rich_table(title, cells, columns))


def row_writer(**widths: int) -> Callable[..., None]:
    """Returns a function that prints one row at a time: in a pipe with tabs below a header, else in columns.

    Args:
        widths: The columns, and their least widths on a terminal, where empty cells are left out.
    """
    began = False

    def write(*cells: str) -> None:
        nonlocal began
        shown = list(map(printable, cells))
        if is_terminal():
            say("  ".join(cell.ljust(width) for cell, width in zip(shown, widths.values(), strict=True) if cell))
            return
        if not began:
            say("\t".join(widths))
        began = True
        say("\t".join(shown))

    return write


def rich_table(title: str, rows: Iterable[Sequence[str]], columns: Iterable[str]) -> Table:
    """A table for a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # As text: names may look like markup.
    cells = [[Text(printable(cell)) for cell in row] for row in rows]
    table = Table(
        title=Text(printable(title)) if title else None, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    # On a narrow terminal all is folded, so that nothing is cut.
    is_wide = Console().width >= _WIDE
    for index, column in enumerate(columns):
        longest = max((len(row[index]) for row in cells), default=0)
        table.add_column(column, overflow="fold", no_wrap=is_wide and longest <= (_SHORT if index else _NAME))
    for row in cells:
        table.add_row(*row)
    return table


def is_terminal() -> bool:
    """Whether people read the output, and not another command."""
    return sys.stdout.isatty()


def printable(text: str) -> str:
    """Text without what would move a terminal's cursor, or end a line or a column."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


# ---------------------------------------------------------------------------------------- progress
class Meter:
    """Counts the bytes that are done; for many threads."""

    def __init__(self, shown: Callable[[int], None]) -> None:
        """Takes what is called with the bytes done so far, after each change."""
        self._shown = shown
        self._lock = threading.Lock()
        self._done = 0

    def add(self, count: int) -> None:
        """Counts further bytes."""
        with self._lock:
            self._done += count
            self._shown(self._done)

    def at(self, done: int) -> None:
        """Sets how many bytes are done; never goes back."""
        with self._lock:
            if done > self._done:
                self._done = done
                self._shown(done)


@contextlib.contextmanager
def progress(what: str, total: int, *, silent: bool) -> Iterator[Meter]:
    """Shows on stderr how far a transfer is while the block runs.

    Args:
        what: What is done, in a word or two.
        total: Bytes in all.
        silent: Show nothing, as beside ``--json``.
    """
    if silent:
        yield Meter(lambda _: None)
    elif sys.stderr.isatty():
        with _bar(what, total) as shown:
            yield Meter(shown)
    else:
        yield Meter(_lines(what, total))


def line(what: str, done: int, total: int, seconds: float) -> str:
    """A transfer in one line; pure."""
    speed = done / max(seconds, 1e-9)
    left = f", {(total - done) / speed:.0f} s left" if done and total >= done else ""
    return f"{what}: {size_text(done)} of {size_text(total)}, {size_text(int(speed))}/s{left}"


def _lines(what: str, total: int) -> Callable[[int], None]:
    started = last = time.monotonic()

    def shown(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY_S:
            last = now
            say(printable(line(what, done, total, now - started)), err=True)

    return shown


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)

    def above(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with (
        Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as shown,
        lines_above(above),
    ):
        task = shown.add_task(printable(what), total=total)
        yield lambda done: shown.update(task, completed=done)
