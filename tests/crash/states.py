"""Crash states of a durable tier in a directory, and of a node's disk: what a file system may leave must be readable.

    make test-crash-states                       all stories
    python tests/crash/states.py --only local    stories whose title holds a text

A drain carries out a story on a directory whose file operations are recorded. Behind each of them, all states are made
that a crash of the machine may leave then (``support/crash_states.py``), and in each a reader must see what the
operations that are done have left, or a step into the next one. A new run, on a node with empty memory, then saves over
it, and everything must be readable still.

The same with what lies on the disk of a node: the spill, and a ``memory_dir`` with its slots and operation log
(``support/node_states.py``). There a sample of the states is tried. Last line: ``crash_states=N losses=0 mixtures=0``.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.node_states import NODES, try_node
from support.swept_states import STORIES, try_story

#: States of a node's disk that are tried behind each operation: what is there is never synced, so they are without number.
DRAWS = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="stories whose title holds this")
    parser.add_argument(
        "--one-of", type=int, default=1, metavar="N", help="behind one of so many operations, by chance"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tried, found, sample = 0, [], 1 / options.one_of
    for kind in (*STORIES, *NODES):
        if options.only in kind.title:
            with contextlib.ExitStack() as stack:
                folder = tempfile.mkdtemp(prefix="tiered-states-", dir="/dev/shm")
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                if kind in STORIES:
                    count, bad = try_story(kind(), folder, seed=options.seed, sample=sample)
                else:
                    count, bad = try_node(kind, folder, seed=options.seed, sample=sample, draws=DRAWS)
            print(f"{kind.title}: {count} states", *bad[:20], sep="\n  ", flush=True)
            tried += count
            found += bad
    mixtures = sum(each.startswith("mixture") for each in found)
    print(f"crash_states={tried} losses={len(found) - mixtures} mixtures={mixtures}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
