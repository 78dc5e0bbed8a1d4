"""One block that measures: seconds, processor seconds, and the peak of anonymous memory of this process.

A benchmark wraps what it looks at in ``with measure() as taken``.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Taken:
    """Costs of a block; the peak only if it was asked for."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_MiB: float = 0.0  # noqa: N815 - the unit


@contextlib.contextmanager
def measure(*, memory: bool = False) -> Iterator[Taken]:
    """Measures the block's costs in this process; the peak costs a thread that looks every 2 ms."""
    taken, ended, peak = Taken(), threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    before = anonymous() if memory else 0
    if memory:
        watcher.start()
    began, used = time.perf_counter(), time.process_time()
    try:
        yield taken
    finally:
        taken.seconds, taken.cpu_s = time.perf_counter() - began, time.process_time() - used
        ended.set()
        if memory:
            watcher.join()
            taken.peak_MiB = max(0.0, (peak - before) / MIB)


def anonymous() -> int:
    """Resident anonymous memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def cpu_of(word: str) -> float:
    """Processor seconds of all other processes whose command line has this word."""
    found = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and word.encode() in (folder / "cmdline").read_bytes():
                found += cpu_of_process(int(folder.name))
    return found


def cpu_of_process(pid: int) -> float:
    """Processor seconds of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of the one divided by the other of the same round, because the machine's speed drifts."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
