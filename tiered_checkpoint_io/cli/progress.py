"""How far a long transfer is, on stderr: a bar on a terminal, else a line now and then, and nothing beside JSON."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tiered_checkpoint_io.cli.output import lines_above, printable, say
from tiered_checkpoint_io.logs import size_text

#: Between two lines where stderr is no terminal, seconds.
EVERY_S = 5.0


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
