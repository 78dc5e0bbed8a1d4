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

from tiered_checkpoint_io.inventory.rows import iso
from tiered_checkpoint_io.logs import size_text

if TYPE_CHECKING:
    from rich.table import Table

#: Exit statuses as in a shell, for a process that a signal has ended.
INTERRUPTED, READER_GONE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
#: Raised when a key of a document changes its meaning or goes; keys that are added leave it.
JSON_VERSION = 1
#: On a terminal of so many columns, cells of so many characters, and names of so many, are not folded.
_WIDE, _SHORT, _NAME = 100, 11, 30
#: Between two lines of progress in a pipe, seconds.
EVERY_S = 5.0

#: The columns of a table: an attribute of the row, or a function that makes a cell of the row.
Columns = Mapping[str, str | Callable[[Any], object]]


def say(text: str, *, err: bool = False) -> None:
    """Prints one line, without codes that would move a terminal's cursor; raises as :func:`write`."""
    write(printable(text), err=err)


def write(text: str, *, err: bool = False) -> None:
    """Prints lines as they are.

    Raises:
        SystemExit: The reader of the output has ended; no more lines are printed.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # Sends the buffered text to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(READER_GONE) from None


def printable(text: str) -> str:
    """Returns text without codes that would move a terminal's cursor, or end a line or a column."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def is_terminal() -> bool:
    """Returns True if people read the output, and not another command."""
    return sys.stdout.isatty()


# -------------------------------------------------------------------------------------------- JSON
def write_json(command: str, document: object) -> None:
    """Prints the answer of a command, a mapping or a dataclass, as the one JSON document on stdout."""
    say(json.dumps({"version": JSON_VERSION, "command": command, **as_json(document)}, allow_nan=False))


def as_json(value: Any) -> Any:
    """Returns the same for JSON: times as ISO 8601 (UTC), and null for a number that is not finite."""
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


# ------------------------------------------------------------------------------------------ tables
def cells_of(row: object, columns: Columns) -> list[str]:
    """Returns the cells of a row: sizes with their unit, nothing for None."""
    cells = []
    for column in columns.values():
        value: Any = getattr(row, column) if isinstance(column, str) else column(row)
        if isinstance(column, str) and column.endswith("_bytes"):
            value = size_text(value)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        cells.append("" if value is None else printable(str(value)))
    return cells


def show(rows: Iterable[object], columns: Columns, title: str = "") -> None:
    """Prints a table: for people on a terminal, else the columns' names and the rows, separated by tabs."""
    cells = [cells_of(row, columns) for row in rows]
    if is_terminal():
        from rich.console import Console

        Console().print(rich_table(title, cells, columns))
    else:
        # Names are never cut or folded here.
        write("\n".join("\t".join(line) for line in [list(columns), *cells]))


def row_writer(columns: Columns, *widths: int) -> Callable[[object], None]:
    """Returns a function that prints one row at a time: in a pipe with tabs below a header, else in columns.

    Args:
        columns: The columns.
        widths: The least widths of the first columns on a terminal, which shows no empty cells.
    """
    began = False

    def add(row: object) -> None:
        nonlocal began
        cells = cells_of(row, columns)
        if is_terminal():
            least = (*widths, *[0] * len(cells))
            say("  ".join(cell.ljust(width) for cell, width in zip(cells, least, strict=False) if cell))
            return
        if not began:
            write("\t".join(columns))
        began = True
        write("\t".join(cells))

    return add


def rich_table(title: str, cells: Sequence[Sequence[str]], columns: Iterable[str]) -> Table:
    """Returns a table for a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, not markup: names may look like it.
    name = Text(printable(title)) if title else None
    table = Table(title=name, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # On a narrow terminal all cells are folded, so that none is cut.
    is_wide = Console().width >= _WIDE
    for index, column in enumerate(columns):
        longest = max((len(row[index]) for row in cells), default=0)
        table.add_column(column, overflow="fold", no_wrap=is_wide and longest <= (_SHORT if index else _NAME))
    for row in cells:
        table.add_row(*map(Text, row))
    return table


# ---------------------------------------------------------------------------------------- progress
@contextlib.contextmanager
def progress(what: str, total: int, *, silent: bool) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a transfer on stderr while the block runs.

    Args:
        what: The transfer, in a word or two.
        total: Bytes in all.
        silent: Show nothing, as with ``--json``.

    Yields:
        A function for many threads, called with the number of further bytes that are done.
    """
    if silent:
        yield lambda _: None
    elif not sys.stderr.isatty():
        yield _lines(what, total)
    else:
        from rich import progress as rich

        columns = (
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.DownloadColumn(binary_units=True),
            rich.TransferSpeedColumn(),
            rich.TimeRemainingColumn(),
        )
        from rich.console import Console

        # Lines of a terminal go above the bar.
        with rich.Progress(
            *columns, console=Console(stderr=True), transient=True, redirect_stdout=is_terminal()
        ) as shown:
            task = shown.add_task(printable(what), total=total)
            yield lambda count: shown.advance(task, count)


def _lines(what: str, total: int) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0
    started = last = time.monotonic()

    def add(count: int) -> None:
        nonlocal done, last
        with lock:
            done += count
            now = time.monotonic()
            if count and now - last >= EVERY_S:
                last, speed = now, done / max(now - started, 1e-9)
                left = f", {(total - done) / speed:.0f} s left" if total >= done else ""
                say(f"{what}: {size_text(done)} of {size_text(total)}, {size_text(int(speed))}/s{left}", err=True)

    return add
