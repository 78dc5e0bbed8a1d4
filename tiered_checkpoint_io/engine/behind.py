"""The end of a save that runs while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from tiered_checkpoint_io.errors import DrainError

T = TypeVar("T")


class _Running(NamedTuple):
    name: str
    thread: threading.Thread
    future: Future[object]


class Behind:
    """One end of a save at a time, on a thread of its own.

    Whoever opens the session next waits for it: there is no second order of operations to think
    about, and no part that is missing where the next restore, delete or save looks for it. A
    process that ends waits for it too.
    """

    def __init__(self, timeout_s: float) -> None:
        """Takes the bound of each wait, seconds."""
        self._timeout_s = timeout_s
        self._running: _Running | None = None

    def run(self, name: str, work: Callable[[], T]) -> Future[T]:
        """Runs ``work``, what is left to do for the checkpoint ``name``, behind what runs already.

        Returns:
            Its result, or the exception that it raised, which is for the caller to show.
        """
        self.settle()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="tiered-seal")
        self._running = _Running(name, thread, future)  # type: ignore[arg-type]
        thread.start()
        return future

    def settle(self) -> None:
        """Waits for what runs, however it ends; on its own thread, for nothing.

        Raises:
            DrainError: It has not ended in time.
        """
        running = self._running
        if running is None or threading.current_thread() is running.thread:
            return
        running.thread.join(self._timeout_s)
        if running.thread.is_alive():
            raise DrainError(
                f"{running.name} is not whole in memory after {self._timeout_s:.0f} s",
                operation="save",
                tier="memory",
                hint="see whether the node is out of memory or of processor time",
            )

    def is_running(self, name: str) -> bool:
        """Whether the end of the save of that name still runs."""
        return self._running is not None and self._running.name == name and not self._running.future.done()
