"""The workers of DataLoaders, which a signal to a whole group of processes must not end before it has saved."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
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
        self._signals = frozenset(signals)
        self._is_on = False
        self._start: Any = None
        self._before: Any = None

    def begin(self) -> None:
        """From now on."""
        if self._is_on:
            return
        self._is_on, before = True, BaseProcess.start

        def start(process: Any) -> None:
            # A fork server would pass the block on to all processes that it starts later.
            if self._is_on and getattr(process, "_target", None) is _worker_loop and _method(process) != "forkserver":
                self._start_deaf(process, before)
            else:
                before(process)

        self._before, self._start = before, start
        BaseProcess.start = start  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        """Workers that start from now on are as any; those that run stay deaf."""
        self._is_on = False
        # What another library has put around it goes on to call it.
        if BaseProcess.start is self._start:
            BaseProcess.start = self._before  # type: ignore[method-assign]

    def _start_deaf(self, process: Any, start: Any) -> None:
        if _method(process) == "spawn":
            # The first start of this process unblocks SIGTERM.
            resource_tracker.ensure_running()
        # Blocked, which lasts through fork and exec: torch replaces each handler of SIGTERM in a worker by its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            start(process)
        finally:
            # What has come meanwhile is delivered now.
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        popen = process._popen
        if signal.SIGTERM in self._signals:
            # By SIGTERM, torch and multiprocessing end workers that are stuck, or still there when the process exits.
            popen.terminate = lambda: _kill(popen)


def _method(process: Any) -> str:
    return process._start_method or multiprocessing.get_start_method()


def _kill(popen: Any) -> None:
    # torch has a handler that raises for workers that were killed, unless they were waited for.
    with contextlib.suppress(RuntimeError):
        popen.kill()
        popen.wait(_END_S)
