"""Simulated lives of jobs, by seeds: the real engine of several nodes under a virtual clock, over a store in memory.

    make test-sim                                   2,000 seeds, on two processes
    python tests/sim/run.py --first 85 --seeds 1    one life again; its history is printed

Each life is judged against a dictionary: of eight seeds, one is of the drains of one run (``drains.py``), one of
replicas on other machines (``peers.py``), two of drains of two runs on the same names (``two_runs.py``; every fourth of
two process groups, one slow, ``two_groups.py``), and four of runs, with trainers, leases and restarts (``runs.py``). In
many, requests fail and clocks are off. Prints the seeds with a violation, and the shortest history; last, figures.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[2] / "examples"))

from sim import drains, peers, runs, two_groups, two_runs
from sim.world import Fates

CALM, ROUGH = Fates(), Fates(failed=0.03, skew=30.0)


def lives_of(seed):
    """Returns the module that runs the lives of a seed."""
    if seed // 2 % 2:
        return runs
    if seed % 16 // 2 == 4:
        return peers
    if seed % 32 // 2 == 14:
        return two_groups
    return two_runs if seed // 4 % 2 else drains


def kind_of(seed):
    """Returns the kind of a seed's lives."""
    lives = lives_of(seed)
    if lives is runs:
        return runs.KINDS[seed // 4 % len(runs.KINDS)]
    return peers.KINDS[seed % 2] if lives is peers else ROUGH if seed % 2 else CALM


def one(job):
    seed, folder = job
    with tempfile.TemporaryDirectory(dir=folder) as memory:
        world = lives_of(seed).life(seed, kind_of(seed), folder=memory)
    return seed, world.steps, world.violation, world.history if world.violation else [], world.digest


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--one-of", type=int, default=1, metavar="N", help="one of so many equal runs of the seeds")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first-found", action="store_true", help="end with the first violation")
    parser.add_argument(
        "--only", choices=["drains", "peers", "two_groups", "two_runs", "runs"], help="leave other lives out"
    )
    parser.add_argument("--memory", default="/dev/shm", metavar="DIR", help="where the memory of nodes is")
    options = parser.parse_args()
    count = options.seeds // options.one_of
    first = options.first + options.seed % options.one_of * count
    seeds, began = range(first, first + count), time.monotonic()
    if options.only:
        seeds = [seed for seed in seeds if lives_of(seed).__name__ == f"sim.{options.only}"]
    steps, found = 0, []
    with (
        # Here, and not by the processes: they may be ended during a life.
        tempfile.TemporaryDirectory(prefix="tiered-sim-", dir=options.memory) as folder,
        multiprocessing.get_context("spawn").Pool(min(options.jobs, len(seeds))) as pool,
    ):
        jobs = [(seed, folder) for seed in seeds]
        for seed, count, violation, history, _ in pool.imap_unordered(one, jobs, chunksize=10):
            steps += count
            if violation:
                found.append((len(history), seed, violation, history))
                if options.first_found:
                    break
    for _, seed, violation, _ in sorted(found)[:20]:
        print(f"seed {seed}: {violation}")
    if found:
        print(*min(found)[3], sep="\n")
    print(f"{steps / (time.monotonic() - began):.0f} steps a second")
    print(f"seeds={len(seeds)} steps={steps} violations={len(found)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
