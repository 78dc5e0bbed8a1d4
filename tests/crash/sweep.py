"""The kill sweep: SIGKILL at the effects of every story of ``support/sweeping.py``, a restart, and a comparison.

    make test-crash                                    everything
    python tests/crash/sweep.py --only "local"         stories whose title holds a text
    python tests/crash/sweep.py --sample 10 --seed 3   ten points of each story
    make test-crash ONE_OF=4 SEED=2                    every fourth point; the seed says from which on

Prints a table by operation and one by kind of effect. Fails where anything is lost or mixed.
"""

import argparse
import contextlib
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.killing import Zygote
from support.rclone_server import RcloneServer
from support.sweeping import Place, Restore, Tally, Trainer, points_of
from support.swept_drains import FullDrain, ShardedDrain
from support.swept_peers import Replication, RestoreFromPeers, Training


def stories():
    """All stories, and whether each needs S3.

    Another procedure is one more entry: a title, ``rehearse`` and ``at``.
    """
    # The longest come first, so that two workers end together. On S3 a point takes one to two seconds, so there it is every
    # second or third; of the same drains on a directory it is each one.
    made = [(ShardedDrain(large=True, limit=120), True), (FullDrain(large=True, limit=120), True)]
    made += [(Replication(victim), False) for victim in ("sender", "receiver")]
    made += [(Training(victim, limit=20), False) for victim in ("trainer-a", "trainer-b")]
    for kind in ("full", "sharded"):
        made += [(RestoreFromPeers(kind, victim), False) for victim in ("loader-a", "loader-b")]
    for kind in ("full", "sharded", "local"):
        made.append((Trainer(kind, "process", "trainer"), False))
        made.append((Restore(kind, "memory whole"), False))
        made.append((Restore(kind, "the newest damaged"), False))
        made.append((Restore(kind, "the node lost"), False))
    made += [
        (Trainer("full", "thread", "trainer and drain", limit=130), False),
        (Trainer("full", "process", "drain"), False),
        (ShardedDrain(), False),
        (FullDrain(), False),
        (Trainer("sharded", "process", "trainer, then drain", limit=110), False),
    ]
    return made


def sweep(story, zygote, folder, *, s3_url="", sample=0, seed=0, one_of=1, add):
    """Takes one story through its points; ``add`` gets each verdict."""
    slug = story.title.replace(" ", "-").replace(",", "") + ("-s3" if s3_url else "")
    durable = f"{s3_url}/{slug}" if s3_url else folder / "durable" / slug
    place = Place(zygote, folder / "memory" / slug, durable, s3=bool(s3_url))
    points = points_of(story.rehearse(place), s3=bool(s3_url), sample=sample, seed=seed // one_of)
    for point in points[seed % one_of :: one_of]:
        add(story.at(place, point))
    shutil.rmtree(place.memory, ignore_errors=True)


def show(tally, console):
    for title, of in (("operation", lambda each: each.doing), ("effect", lambda each: each.effect)):
        table = Table(title=f"Killed, by {title}", show_footer=True)
        rows = list(tally.rows(of))
        sums = [sum(row[at] for row in rows) for at in range(1, 6)]
        table.add_column(title, "all")
        for name, total in zip(("points", "old restored", "new restored", "losses", "mixtures"), sums, strict=True):
            table.add_column(name, str(total), justify="right")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)
    for each in tally.bad():
        console.print(f"{each.found}: {each.doing}, {each.effect}, {each.why}", markup=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes at work at once")
    parser.add_argument("--sample", type=int, default=0, help="points of each story; 0 for all")
    parser.add_argument("--one-of", type=int, default=1, metavar="N", help="one of so many points of each story")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="stories whose title holds this")
    options = parser.parse_args()
    console, tally, started = Console(width=120), Tally(), time.monotonic()
    todo: queue.Queue = queue.Queue()
    for story, on_s3 in stories():
        if options.only in story.title:
            todo.put((story, on_s3))
    failures = []
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="tiered-sweep-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        server = stack.enter_context(RcloneServer(folder / "s3"))
        server.folder.mkdir(exist_ok=True)
        os.environ.update(server.env())
        s3_url = server.make_bucket("sweep")

        def work():
            with Zygote() as zygote:
                while not failures:
                    try:
                        story, on_s3 = todo.get_nowait()
                    except queue.Empty:
                        return
                    began = time.monotonic()
                    try:
                        sweep(
                            story,
                            zygote,
                            folder,
                            s3_url=s3_url if on_s3 else "",
                            sample=options.sample or story.limit,
                            seed=options.seed,
                            one_of=options.one_of,
                            add=tally.add,
                        )
                    except BaseException as error:
                        failures.append((story.title, error))
                        raise
                    name = story.title + (" (S3)" if on_s3 else "")
                    console.print(f"{time.monotonic() - began:6.1f} s  {name}", highlight=False)

        workers = [threading.Thread(target=work) for _ in range(options.jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    show(tally, console)
    for title, error in failures:
        console.print(f"broken off: {title}: {error!r}", markup=False)
    console.print(f"{time.monotonic() - started:.0f} s, seed {options.seed}, one of {options.one_of}", highlight=False)
    losses, mixtures = tally.count("loss"), tally.count("mixture")
    print(f"points={len(tally.verdicts)} losses={losses} mixtures={mixtures}")
    return 1 if losses or mixtures or failures or not tally.verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
