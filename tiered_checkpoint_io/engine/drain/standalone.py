"""A drain as a process of its own. A trainer's is started here, without what all the commands of tiered-ckpt import."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from tiered_checkpoint_io.engine.drain.ending import ended_by_signal
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, get_logger

#: How often a drain that stands by looks whether it is needed, seconds.
_STAND_BY_S = 1.0
#: How much lower than the trainer's its priority is. Where training fills all cores, it still gets a tenth of one.
_NICENESS = 10


def run(worker: Drain, root: Path, log: Logger, stop: threading.Event, *, stay: bool = False) -> bool:
    """Lets a drain work, or stand by where another one works.

    Returns:
        Whether it had the root at first.

    Raises:
        DrainError: See :meth:`Drain.follows`.
    """
    worked = worker.run()
    if not worked:
        stands_by = stay or worker.follows()
        log.info("another drain works on %s; %s", root, "standing by" if stands_by else "leaving")
        while (stay or worker.follows()) and not stop.wait(_STAND_BY_S) and not worker.run():
            pass
    return worked


def give_way(niceness: int) -> None:
    """Lowers this process' priority: what else runs on the node is to have the cores."""
    with contextlib.suppress(OSError):
        niceness = os.nice(niceness)
        if os.getsid(0) == os.getpid():
            # Linux may share the cores out among sessions first, by this, and go by niceness only within each.
            Path("/proc/self/autogroup").write_text(str(niceness))


def main() -> None:
    """The drain of a trainer, over the root that is the last argument; an error is one line on stderr, and status 1."""
    # Slurm signals all processes of a step: these tell the trainer to make its last checkpoint, which is uploaded here.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    give_way(_NICENESS)
    root = Path(sys.argv[-1])
    log = get_logger(root.name)
    try:
        with ended_by_signal(log, late=0) as stop:
            run(Drain(root, logger=log, stop=stop, for_trainer=True), root, log, stop)
    except (TieredCheckpointError, OSError) as error:
        sys.exit(f"error: {error}")
