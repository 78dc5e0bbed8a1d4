"""The workers of DataLoaders, which a signal to a whole group of processes must not end before it has saved."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import signal
import weakref
from collections.abc import Iterable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data._utils.worker import _worker_loop

#: How long the end of a worker that was killed is waited for, seconds.
_END_S = 5.0


class DeafWorkers:
    """Has each worker that starts meanwhile take no notice of some signals; only the trainer acts on those.

    Launchers and Slurm signal all processes of a rank. A worker that ends of a signal fails the batch under way.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signals = frozenset(signals)

    def begin(self) -> None:
        """From now on."""
        if self not in _begun:
            _begun.append(self)
        _replace_start()

    def end(self) -> None:
        """Workers that start from now on are as any, unless another one is on; those that run stay deaf."""
        if self in _begun:
            _begun.remove(self)
        if not _begun:
            _restore_start()


#: Those that are on: trainings may take turns, or end in another order than they began.
_begun: list[DeafWorkers] = []
#: What stands in place of BaseProcess.start while any is on, and what stood there before; None while none is.
_replaced: tuple[Any, Any] | None = None


def _replace_start() -> None:
    global _replaced
    if _replaced is not None:
        return
    before = BaseProcess.start

    def start(process: Any) -> None:
        signals: frozenset[signal.Signals] = frozenset().union(*(each.signals for each in _begun))
        # A fork server would pass the block on to all processes that it starts later.
        if signals and getattr(process, "_target", None) is _worker_loop and _method(process) != "forkserver":
            _start_deaf(process, before, signals)
        else:
            before(process)

    _replaced = start, before
    BaseProcess.start = start  # type: ignore[method-assign, assignment]


def _restore_start() -> None:
    global _replaced
    # A wrapper that another library has put around ours keeps calling ours.
    if _replaced is not None and BaseProcess.start is _replaced[0]:
        BaseProcess.start = _replaced[1]  # type: ignore[method-assign]
    _replaced = None


def _start_deaf(process: Any, start: Any, signals: frozenset[signal.Signals]) -> None:
    if _method(process) == "spawn":
        # The first start of this process unblocks SIGTERM.
        resource_tracker.ensure_running()
    # Blocked, which lasts through fork and exec: torch replaces each handler of SIGTERM in a worker by its own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        start(process)
    finally:
        # What has come meanwhile is delivered now.
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    popen = process._popen
    if signal.SIGTERM in signals:
        # By SIGTERM, torch and multiprocessing end workers that are stuck, or still there when the process exits.
        # A strong reference to itself would keep its descriptors open until the garbage collector comes.
        popen.terminate = functools.partial(_kill, weakref.proxy(popen))


def _method(process: Any) -> str:
    return process._start_method or multiprocessing.get_start_method()


def _kill(popen: Any) -> None:
    # torch has a handler that raises for workers that were killed, unless they were waited for.
    with contextlib.suppress(RuntimeError):
        popen.kill()
        popen.wait(_END_S)
