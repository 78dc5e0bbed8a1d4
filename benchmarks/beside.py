"""Benchmarks of this tree beside those of another commit, by turns in one run: does a change make anything slower?

A turn runs a benchmark of the one tree and then of the other, in an order that changes from turn to turn, in processes
of their own with the same installed libraries. A figure is the median of a whole benchmark run; printed are the
medians of the turns, and, last, ``<benchmark>_ratio_to_<commit>=X`` for each: the greatest of its rows' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
#: Our row in the table of each benchmark.
ROWS = {"stall": "ours", "sharded": "ours", "recovery": "from"}


def run(tree: Path, benchmark: str, options: list[str]) -> dict[str, float]:
    """The seconds of our rows, by name."""
    env = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, str(tree / "benchmarks" / f"{benchmark}.py"), *options],
        env=env,
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{benchmark} of {tree} ended with {done.returncode}:\n{done.stderr}")
    rows = re.findall(r"^[│|]\s*(.*?)\s*[│|]\s*([0-9.]+)\s*[│|]", done.stdout, re.MULTILINE)
    found = {name: float(seconds) for name, seconds in rows if name.startswith(ROWS[benchmark])}
    if not found:
        raise RuntimeError(f"no row of {benchmark} begins with {ROWS[benchmark]!r}:\n{done.stdout}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=ROWS, action="append", help="this benchmark; may be repeated")
    parser.add_argument("--mebibytes", help="as the benchmarks take it")
    parser.add_argument("--rounds", help="as the benchmarks take it")
    arguments = parser.parse_args()
    options = [f"--{name}={value}" for name in ("mebibytes", "rounds") if (value := getattr(arguments, name))]
    with contextlib.ExitStack() as stack:
        other = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiered-beside-"))) / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), arguments.commit], check=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(other)], check=True)
        lines = []
        for benchmark in arguments.only or ROWS:
            seconds: dict[str, dict[Path, list[float]]] = defaultdict(lambda: defaultdict(list))
            for turn in range(arguments.turns):
                for tree in (other, HERE) if turn % 2 == 0 else (HERE, other):
                    for name, value in run(tree, benchmark, options).items():
                        seconds[name][tree].append(value)
            ratios = []
            for name, by_tree in seconds.items():
                before, now = (statistics.median(by_tree[tree]) for tree in (other, HERE))
                ratios.append(now / before)
                print(
                    f"{benchmark}, {name}: {before:.3f} s at {arguments.commit}, {now:.3f} s here,"
                    f" ratio {ratios[-1]:.2f} (turns: {by_tree[other]} and {by_tree[HERE]})",
                    flush=True,
                )
            lines.append(f"{benchmark}_ratio_to_{arguments.commit}={max(ratios):.2f}")
        print(" ".join(lines))


if __name__ == "__main__":
    main()
