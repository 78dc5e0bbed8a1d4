"""The output of commands: tables on a terminal, tabs in a pipe, progress on stderr, and JSON for programs."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.inventory.rows import iso
from tiered_checkpoint_io.logs import size_text

#: Exit statuses as in a shell, for a process that a signal has ended.
INTERRUPTED, TERMINATED, READER_GONE = 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGPIPE
#: Raised when a key of a document changes its meaning or goes; keys that are added leave it.
JSON_VERSION = 1
#: Between two lines of progress, seconds.
EVERY_S = 5.0

#: The columns of a table: an attribute of the row, or a function that makes a cell of the row.
Columns = Mapping[str, str | Callable[[Any], object]]


def say(text: str, *, err: bool = False) -> None:
    """Prints one line, without codes that would move a terminal's cursor; raises as :func:`write`."""
    write(printable(text), err=err)


def write(text: str, *, err: bool = False) -> None:
    """Prints lines as they are; raises SystemExit if the reader of the output has ended."""
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
    if hasattr(value, "_asdict"):
        value = value._asdict()
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
    """Returns the cells of a row: sizes with their unit, nothing for None or an empty list."""
    cells = []
    for column in columns.values():
        value: Any = getattr(row, column) if isinstance(column, str) else column(row)
        if isinstance(column, str) and column.endswith("_bytes"):
            value = size_text(value)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, datetime):
            value = iso(value)
        elif isinstance(value, Mapping):
            value = ", ".join(f"{what} {each}" for what, each in value.items())
        elif isinstance(value, list | tuple):
            value = ", ".join(map(str, value))
        cells.append("" if value is None else printable(str(value)))
    return cells


def show(rows: Iterable[object], columns: Columns, title: str = "") -> None:
    """Prints a table: on a terminal below a title and without empty columns; in a pipe with tabs."""
    lines = [list(columns), *(cells_of(row, columns) for row in rows)]
    if title and is_terminal():
        say(title)
    # A column is as wide as its longest cell; one without any is left out.
    widths = [max(map(len, column)) if any(column[1:]) else 0 for column in zip(*lines, strict=True)]
    for line in lines:
        _print_line(line, widths)


def row_writer(columns: Columns, *widths: int) -> Callable[[object], None]:
    """Returns a function that prints one row at a time, the first one below a header; ``widths`` are the least."""
    began = False

    def add(row: object) -> None:
        nonlocal began
        if not began:
            _print_line(list(columns), widths)
        began = True
        _print_line(cells_of(row, columns), widths)

    return add


def _print_line(cells: Sequence[str], widths: Sequence[int]) -> None:
    # Names are never cut or folded in a pipe.
    if is_terminal():
        say("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True) if width).rstrip())
    else:
        write("\t".join(cells))


# ---------------------------------------------------------------------------------------- progress
def progress(what: str, total: int, *, silent: bool) -> Callable[[int], None]:
    """Returns a function for many threads, called with the bytes that were done, which prints a line every 5 s."""
    lock, done = threading.Lock(), 0
    started = last = time.monotonic()

    def add(count: int) -> None:
        nonlocal done, last
        with lock:
            done += count
            now = time.monotonic()
            if count and not silent and now - last >= EVERY_S:
                last, speed = now, done / max(now - started, 1e-9)
                left = f", {(total - done) / speed:.0f} s left" if total >= done else ""
                say(f"{what}: {size_text(done)} of {size_text(total)}, {size_text(int(speed))}/s{left}", err=True)

    return add
