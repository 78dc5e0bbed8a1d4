"""Tools that benchmark scripts share: a folder on tmpfs, a job of two ranks, and a table of seconds."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tiered_checkpoint_io

#: Time for the second rank to end once the first has, seconds.
_LAST_RANK_S = 60.0


def compile_ours() -> None:
    """Compiles the package, as installers do with its peers: else each new process may do so again."""
    compileall.compile_dir(tiered_checkpoint_io.__path__[0], quiet=1)


def shm_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder on tmpfs, as a context manager that removes it."""
    return tempfile.TemporaryDirectory(prefix="tiered-bench-", dir="/dev/shm", ignore_cleanup_errors=True)


def job_env(rank: int, world_size: int, port: int, *, nodes: int = 1) -> dict[str, str]:
    """Returns the environment of one rank for torch.distributed; this machine counts as so many nodes."""
    local = world_size // nodes
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        # Replicas go to other machines only.
        "TIERED_CHECKPOINT_MACHINE": f"node-{rank // local}",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def two_ranks(arguments: Sequence[object], *, nodes: int, limit_s: float | None = None) -> Any:
    """Runs the calling script as two ranks with the arguments; the last line that the first printed, read as JSON.

    Raises:
        RuntimeError: The first rank failed.
        subprocess.TimeoutExpired: The first rank has not ended within ``limit_s``.
    """
    command, port = [sys.executable, sys.argv[0], *map(str, arguments)], free_port()
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            env = {**os.environ, "OMP_NUM_THREADS": "1", **job_env(rank, 2, port, nodes=nodes)}
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            stack.callback(ranks[-1].kill)
        printed, _ = ranks[0].communicate(timeout=limit_s)
        if ranks[0].returncode:
            raise RuntimeError(f"the first rank ended with {ranks[0].returncode}")
        ranks[1].communicate(timeout=_LAST_RANK_S)
    return json.loads(printed.strip().splitlines()[-1])


def spread_of(seconds: Sequence[float]) -> list[str]:
    """Cells: the median, the fastest and the slowest."""
    return [f"{each:.3f}" for each in (statistics.median(seconds), min(seconds), max(seconds))]


def show_table(title: str, columns: Sequence[str], rows: Mapping[str, Iterable[str]], width: int = 100) -> None:
    """Prints a table: a row for each name, with a cell for each column."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(name, *row)
    Console(width=width).print(table)
