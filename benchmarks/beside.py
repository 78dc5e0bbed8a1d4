"""Benchmarks of this tree beside those of another commit, by turns in one run: does a change make anything slower?

A turn runs a benchmark of the one tree and then of the other, in an order that changes from turn to turn, in processes
of their own with the same installed libraries. A figure is the median of a whole benchmark run; printed are the
medians of the turns, their ratio, and, last, ``slowest_ratio_to_<commit>=X``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from goals import CALL, SHARDED_CALL

HERE = Path(__file__).resolve().parent.parent
#: Runs a contender with a state that not all trees have in their list.
CONTENDER = (
    "import contender, states; states.STATES['1,000 tensors'] = lambda size: states.make_many(size, 1_000);"
    "contender.main()"
)
Figures = Mapping[str, Any]
Read = Callable[[Figures], dict[str, float]]


def saves(name: str, state: str, key: str) -> tuple[list[str], Read]:
    """A contender with a state: seconds of its saves."""
    return ["-c", CONTENDER, name, state, "FOLDER"], lambda found: {"": statistics.median(found[key])}


def restores(found: Figures) -> dict[str, float]:
    return {key: found["ways"][key]["seconds"] for key in ("dcp_memory", "io_memory", "dcp_s3", "io_s3")}


#: The command of each measure, and the reader of its rows, seconds, in the JSON of its last lines.
MEASURES: dict[str, tuple[list[str], Read]] = {
    **{f"eager stall, {each}": saves("ours, memory step", each, "stall") for each in ("64 tensors", "1,000 tensors")},
    "eager stall, 20,000 tensors": (
        saves("ours, memory step", "20,000 tensors", "stall")[0],
        lambda found: {key: statistics.median(found[key]) for key in ("stall", "memcpy")},
    ),
    "drain": saves("ours, durable step", "64 tensors", "done"),
    "overlapped call": ([*CALL.split()], lambda found: {"": found["share_ms"] / 1e3}),
    "overlapped sharded call": ([*SHARDED_CALL.split()], lambda found: {"": found["share_ms"] / 1e3}),
    "sharded stall": (["sharded"], lambda found: {"": found["ours_s"]}),
    "restore": (["restore", "--mebibytes=1024"], restores),
    "recovery": (["recovery"], lambda found: dict(found["seconds"])),
}


def run(tree: Path, command: list[str], read: Read) -> dict[str, float]:
    """Returns the seconds of each row."""
    first, *more = command
    with tempfile.TemporaryDirectory(prefix="tiered-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", first if first == "-c" else f"{first}.py"]
            + [folder if each == "FOLDER" else each for each in more],
            env={**os.environ, "PYTHONPATH": str(tree)},
            cwd=tree / "benchmarks",
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{command} of {tree} ended with {done.returncode}:\n{done.stderr}")
    return read(json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=MEASURES, action="append", help="this measure; may be repeated")
    arguments = parser.parse_args()
    ratios = []
    with contextlib.ExitStack() as stack:
        other = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiered-beside-"))) / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), arguments.commit], check=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(other)], check=True)
        for measure in arguments.only or MEASURES:
            seconds: dict[str, dict[Path, list[float]]] = defaultdict(lambda: defaultdict(list))
            for turn in range(arguments.turns):
                for tree in (other, HERE) if turn % 2 == 0 else (HERE, other):
                    for row, value in run(tree, *MEASURES[measure]).items():
                        seconds[row][tree].append(value)
            for row, by_tree in seconds.items():
                before, now = (statistics.median(by_tree[tree]) for tree in (other, HERE))
                ratios.append(now / before)
                print(
                    f"{measure}{row and f', {row}'}: {before:.4f} s at {arguments.commit}, {now:.4f} s here,"
                    f" ratio {ratios[-1]:.2f} (turns: {[*by_tree.values()]})",
                    flush=True,
                )
    print(f"slowest_ratio_to_{arguments.commit}={max(ratios):.2f}")


if __name__ == "__main__":
    main()
