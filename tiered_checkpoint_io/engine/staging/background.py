"""The end of a save that runs while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tiered_checkpoint_io.errors import DrainError

T = TypeVar("T")


class BackgroundTask:
    """At most one end of a save at a time, on a thread of its own.

    Opening the session waits for it, so the next restore, delete or save finds all parts in memory. A process that
    ends waits for it too.
    """

    def __init__(self, timeout_s: float) -> None:
        """Takes the bound of each wait, seconds."""
        self._timeout_s = timeout_s
        self._name = ""
        self._thread: threading.Thread | None = None
        self._future: Future[Any] | None = None

    def run(self, name: str, work: Callable[[], T]) -> Future[T]:
        """Runs ``work``, what is left to do for the checkpoint ``name``, after what runs already.

        Returns:
            Its result, or the exception that it raised, which is for the caller to show.
        """
        self.wait()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._name, self._future = name, future
        thread = threading.Thread(target=run, name="tiered-seal")
        thread.start()
        # Not before: who waits on another thread could not wait for one that has not begun.
        self._thread = thread
        return future

    def wait(self) -> None:
        """Waits for what runs, however it ends; does nothing on its own thread.

        Raises:
            DrainError: It has not ended in time.
        """
        thread = self._thread
        if thread is None or threading.current_thread() is thread:
            return
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise DrainError(
                f"{self._name} is not complete in memory after {self._timeout_s:.0f} s",
                operation="save",
                tier="memory",
                hint="see whether the node is out of memory or of processor time",
            )

    def is_running(self, name: str) -> bool:
        """Whether the end of the save of that name still runs."""
        return self._name == name and self._future is not None and not self._future.done()
