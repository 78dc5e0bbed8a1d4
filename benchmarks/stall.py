"""How long training waits for a checkpoint: ours beside a plain copy and what others do.

One process, one state of 1 GiB on the CPU, warm: ours and the copy in turn, then the others in turn. Prints the
median of each, how much resident memory ours adds to the training process, and, last,
``stall_ratio_to_memcpy=X``: the median over rounds of ours divided by the copy of the same round.

``--tensors 64 1000 20000`` compares states of so many tensors instead, all of the same size: the first, second and
third save, and the median of the later ones, each divided by the copy of these tensors in the same round, by the clock
and by processor time; and what planning costs for each tensor, first, second, later, and by ``torch.save``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from states import all_tensors, at_step, make_many, make_state

MIB = 1 << 20


def measure_many(folder: str, mebibytes: int, count: int, rounds: int) -> dict[str, float]:
    """Ratios to the copy, and microseconds a tensor."""
    from tiered_checkpoint_io.formats.image import plan
    from tiered_checkpoint_io.formats.layouts import Layouts

    state = make_many(mebibytes, count)
    sources = all_tensors(state)
    targets = [tensor.clone() for tensor in sources]
    ours, layouts = Ours(folder), Layouts()
    clocks = (time.perf_counter, time.process_time)
    ratios: tuple[list[float], list[float]] = ([], [])
    planned: list[float] = []
    by_torch: list[float] = []
    for step in range(1, rounds + 4):
        now = at_step(state, step)
        for times, before in ((planned, layouts.plan), (by_torch, plan)):
            start = time.process_time()
            before(now)
            times.append((time.process_time() - start) / len(sources) * 1e6)
        copy_from = [clock() for clock in clocks]
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        save_from = [clock() for clock in clocks]
        ours.save(now)
        for kind, clock in enumerate(clocks):
            ratios[kind].append((clock() - save_from[kind]) / (save_from[kind] - copy_from[kind]))
    ours.close()
    clock, processor = ratios
    return {
        **{f"{nth} save": clock[index] for index, nth in enumerate(("first", "second", "third"))},
        "later": statistics.median(clock[3:]),
        "later, processor": statistics.median(processor[3:]),
        "plan, first, us": planned[0],
        "plan, second, us": planned[1],
        "plan, later, us": statistics.median(planned[2:]),
        "torch.save's, us": statistics.median(by_torch[1:]),
    }


class Ours:
    """A synchronous memory step: planned, copied, hashed and committed when it returns."""

    def __init__(self, folder: str) -> None:
        from tiered_checkpoint_io import TieredCheckpointIO

        self.io = TieredCheckpointIO(
            dirpath=f"{folder}/durable", memory_dir=folder, on_save_error="raise", memory_allocation_percentage=100
        )
        self.count = 0

    def save(self, state: Any) -> None:
        self.count += 1
        self.io.save_checkpoint(state, f"step={self.count}.ckpt", storage_options={"tiers": ["memory"]})

    def close(self) -> None:
        self.io.teardown()


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def contenders(
    state: Any, folder: str, stack: contextlib.ExitStack
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each, what is timed, and what ends it, untimed, before the next."""
    import torch.distributed.checkpoint as dcp
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    sources = all_tensors(state)
    targets = [torch.empty_like(tensor) for tensor in sources]

    def memcpy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    ours = Ours(folder)
    stack.callback(ours.close)
    lightning = TorchCheckpointIO()
    asynchronous = AsyncCheckpointIO(TorchCheckpointIO())
    pending: list[Any] = []

    def dcp_save() -> None:
        pending.append(dcp.async_save(state, checkpoint_id=f"{folder}/dcp"))

    def dcp_end() -> None:
        pending.pop().result()
        shutil.rmtree(f"{folder}/dcp")

    def remove(name: str) -> Callable[[], None]:
        return lambda: os.unlink(f"{folder}/{name}")

    def async_end() -> None:
        asynchronous.teardown()
        os.unlink(f"{folder}/async.ckpt")

    def nothing() -> None:
        return None

    return {
        "memcpy into warm buffers": (memcpy, nothing),
        "ours, sync memory step": (lambda: ours.save(state), nothing),
        "torch.save to tmpfs": (lambda: torch.save(state, f"{folder}/plain.ckpt"), remove("plain.ckpt")),
        "Lightning TorchCheckpointIO": (
            lambda: lightning.save_checkpoint(state, f"{folder}/torch.ckpt"),
            remove("torch.ckpt"),
        ),
        "Lightning AsyncCheckpointIO, blocking part": (
            lambda: asynchronous.save_checkpoint(state, f"{folder}/async.ckpt"),
            async_end,
        ),
        "DCP async_save, blocking part": (dcp_save, dcp_end),
    }


def resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def measure_memory(folder: str, mebibytes: int) -> float:
    """Peak of resident anonymous memory over what it was before the first save, in MiB."""
    state = make_state(mebibytes)
    ours = Ours(folder)
    # What is loaded once, and not for a checkpoint, is not a checkpoint's cost.
    ours.save({"global_step": 1, "w": torch.zeros(10)})
    before = resident("RssAnon")
    peak = before
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(5):
        ours.save(state)
    ended.set()
    watcher.join()
    ours.close()
    return (peak - before) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensors", type=int, nargs="+", default=[], metavar="COUNT")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging

    logging.getLogger("tiered_checkpoint_io").addHandler(logging.NullHandler())
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="tiered-bench-", dir="/dev/shm")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if arguments.memory:
            print(f"{measure_memory(folder, arguments.mebibytes):.1f}")
            return
        if arguments.tensors:
            measured = {
                count: measure_many(folder, arguments.mebibytes, count, arguments.rounds) for count in arguments.tensors
            }
            show_many(measured, arguments.mebibytes)
            return
        state = make_state(arguments.mebibytes)
        size = sum(tensor.nbytes for tensor in all_tensors(state)) / (1 << 30)
        runs = contenders(state, folder, stack)
        first, second, *others = runs
        times: dict[str, list[float]] = {name: [] for name in runs}
        ratios: dict[str, float] = {first: 1.0}
        # Ours beside the copy first, and then the others, which leave memory in disorder behind them.
        for group in ([second], others):
            copies: list[float] = []
            for number in range(arguments.rounds + 2):
                for name in (first, *group):
                    call, end = runs[name]
                    seconds = timed(call)
                    end()
                    # The first two rounds make everybody's memory warm.
                    if number >= 2:
                        (copies if name == first else times[name]).append(seconds)
            # Round by round, because the machine's speed drifts: each against the copy of its own round.
            for name in group:
                ratios[name] = statistics.median(mine / copy for mine, copy in zip(times[name], copies, strict=True))
            times[first] = times[first] or copies
        show(times, ratios, size)
        command = [sys.executable, __file__, "--memory", "--mebibytes", str(arguments.mebibytes)]
        extra = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
        print(f"extra_resident_MiB={extra}")
        print(f"stall_ratio_to_memcpy={ratios[second]:.2f}")


def show(times: dict[str, list[float]], ratios: dict[str, float], size: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"How long training waits: {size:.2f} GiB, median of {len(next(iter(times.values())))} rounds")
    for column in ("", "seconds", "fastest", "slowest", "GiB/s", "x memcpy"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        row = (f"{middle:.3f}", f"{min(seconds):.3f}", f"{max(seconds):.3f}", f"{size / middle:.1f}")
        table.add_row(name, *row, f"{ratios[name]:.2f}")
    Console(width=100).print(table)


def show_many(measured: dict[int, dict[str, float]], mebibytes: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{mebibytes} MiB in so many tensors: saves divided by the copy, and planning, us a tensor")
    table.add_column("")
    for count in measured:
        table.add_column(f"{count:,}", justify="right")
    for name in next(iter(measured.values())):
        table.add_row(name, *(f"{figures[name]:.2f}" for figures in measured.values()))
    Console(width=100).print(table)
    for count, figures in measured.items():
        print(f"stall_ratio_to_memcpy_{count}={figures['later']:.2f}")


if __name__ == "__main__":
    main()
