"""Every contender beside the others: saves, restores, uploads, in one table, and the goals of this project.

``make bench`` runs it, in 10 to 20 minutes; ``--quick`` takes small states and few rounds, ``--resume`` continues an
interrupted run. Each contender and state runs in a process of its own beside a copy into warm tensors: ratios are
of one process. The other benchmarks run one after another, and their figures go into the same file of JSON, and with
``--page`` into docs/benchmarks.md with its plot. The last line is ``goals_met=M of N``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contenders import CONTENDERS
from goals import CALL, SHARDED_CALL, judged
from page import console, write
from peers import python_for
from running import compile_ours, shm_folder
from states import STATES

HERE = Path(__file__).resolve().parent
LIMIT_S = 100.0
#: Time for a benchmark that is over its limit to end in order, seconds.
END_S = 30.0
#: The state of the peers. Ours are measured with the others too.
COMMON = "64 tensors"
OURS = [name for name in CONTENDERS if name.startswith("ours")]
#: Factor by which states of goals about 1 GiB are larger, if no peer is measured with them: a step of
#: LoRA changes less of 256 MiB than the smallest piece that S3 copies.
LARGE = 4
#: The other benchmarks, with their options, and how many times as large their states are; 0: they take no sizes.
SCRIPTS = {
    "restore": LARGE,
    "clients": 1,
    "sharded": 1,
    "planning": 0,
    "first": 1,
    CALL: 0,
    SHARDED_CALL: 0,
    "overlap": 0,
    "overlap --sharded": 0,
    "loop": 1,
    "replication": LARGE,
    "recovery": 1,
    "restart": 1,
}


def child(command: list[str], limit_s: float = LIMIT_S) -> tuple[str, str]:
    """Returns a process's output, and the reason of its failure; "" without one."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=HERE.parent, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # As Ctrl-C: it ends its own processes, and removes its folder on tmpfs.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)
            process.kill()
            return "", f"nothing after {limit_s:.0f} s"
    last = (errors.strip().splitlines() or [""])[-1]
    return out, "" if process.returncode == 0 else f"ended with {process.returncode}: {last}"


def contended(name: str, state: str, mebibytes: int, rounds: int) -> dict[str, Any]:
    """One contender with one state, or why it could not run."""
    with shm_folder() as folder:
        command = [python_for(name), "-W", "ignore", str(HERE / "contender.py"), name, state, folder]
        out, error = child([*command, f"--mebibytes={mebibytes}", f"--rounds={rounds}"])
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": error or "it wrote nothing"}
    return {"contender": name, "state": state, **found}


def script(name: str, *options: str) -> dict[str, Any]:
    """The figures (``name=value``, or JSON) in the last lines of one of the other benchmarks, or why it failed."""
    # Of these, only the one that compares clients wants a library of others.
    python = python_for("obstore") if name == "clients" else sys.executable
    file, *more = name.split()
    out, error = child([python, "-W", "ignore", str(HERE / f"{file}.py"), *more, *options], 3 * LIMIT_S)
    lines = out.strip().splitlines()
    if error or not lines:
        return {"error": error or "it wrote nothing"}
    found: dict[str, Any] = {}
    for line in lines[-4:]:
        if line.startswith("{"):
            found |= json.loads(line)
        elif re.fullmatch(r"(\w+=[0-9.]+ ?)+", line):
            found |= {key: float(value) for key, value in re.findall(r"(\w+)=([0-9.]+)", line)}
    return found


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Says what one of the benchmarks took."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{time.perf_counter() - began:6.1f} s, {used:6.1f} CPU s: {name}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Returns facts about the machine, and the versions of this measurement."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    names = ("torch", "lightning", "boto3", "numpy")
    try:
        git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return {
        "cores": os.cpu_count(),
        "memory_GiB": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "commit": commit,
        "load_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small states, few rounds")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), help="contenders", choices=CONTENDERS)
    parser.add_argument("--no-scripts", action="store_true", help="contenders alone")
    parser.add_argument("--mebibytes", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run, from its file")
    parser.add_argument("--json", default="build/bench.json", help="the file of figures")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    mebibytes = options.mebibytes or (64 if options.quick else 256)
    rounds = options.rounds or (2 if options.quick else 5)
    found: dict[str, Any] = {
        # Where the figures are kept matters to this machine alone.
        "options": " ".join(each for each in sys.argv[1:] if each not in ("--json", options.json)),
        "machine": machine(),
        "mebibytes": mebibytes,
        "rounds": rounds,
        "rows": [],
    }
    if options.resume:
        found = json.loads(Path(options.json).read_text())
        mebibytes, rounds = found["mebibytes"], found["rounds"]
    compile_ours()
    pairs = [(name, COMMON) for name in options.only]
    if not options.no_scripts:
        pairs += [(name, state) for name in OURS for state in STATES if state != COMMON]
    has = {(row["contender"], row["state"]) for row in found["rows"]}

    def keep() -> None:
        """Writes what there is: a run that is cut off leaves what it has measured."""
        found["machine"]["load_after"] = os.getloadavg()[0]
        found["goals"] = judged(found)
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
        if options.page:
            write(found, HERE.parent / "docs")

    for name, state in pairs:
        if (name, state) not in has:
            with timed(f"{name}, {state}"):
                found["rows"].append(contended(name, state, mebibytes, rounds))
            keep()
    if not options.no_scripts:
        for name, times in SCRIPTS.items():
            if name not in found:
                sizes = [f"--mebibytes={times * mebibytes}", f"--rounds={rounds}"] if times else []
                with timed(name):
                    found[name] = script(name, *sizes)
                keep()
    keep()
    console(found)
    met = sum(goal["met"] is True for goal in found["goals"])
    print(f"goals_met={met} of {len(found['goals'])}")


if __name__ == "__main__":
    main()
