"""The end of a save that runs while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tiered_checkpoint_io.errors import DrainError

T = TypeVar("T")


class BackgroundTask:
    """At most one end of a save at a time, and what follows it, on a thread of its own.

    Opening the session waits for it, so the next restore, delete or save finds all parts in memory. A process that
    ends waits for it too. The thread waits for the next task: to start one, a caller would wait for a core.
    """

    def __init__(self, timeout_s: float) -> None:
        """Takes the bound of each wait, seconds."""
        self._timeout_s = timeout_s
        self._tasks: list[tuple[str, Future[Any]]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._thread: int | None = None

    def run(self, name: str, work: Callable[[], T]) -> Future[T]:
        """Runs ``work``, what is left to do for the checkpoint ``name``, after what runs already.

        Returns:
            Its result, or the exception that it raised, which is for the caller to show.
        """
        self.wait()
        self._tasks = []
        return self.follow(name, work)

    def follow(self, name: str, work: Callable[[], T]) -> Future[T]:
        """As :meth:`run`, but without waiting for what runs already."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "tiered-seal", self._begin)
        future = self._pool.submit(work)
        self._tasks = [*self._tasks, (name, future)]
        return future

    def _begin(self) -> None:
        self._thread = threading.get_ident()

    def wait(self) -> None:
        """Waits for what runs, however it ends; does nothing on its own thread.

        Raises:
            DrainError: It has not ended in time.
        """
        if threading.get_ident() == self._thread:
            return
        if not self.is_busy:
            return
        tasks = self._tasks
        _, left = wait([future for _, future in tasks], self._timeout_s)
        if left:
            name = next(name for name, future in tasks if future in left)
            raise DrainError(
                f"{name} is not complete in memory after {self._timeout_s:.0f} s",
                operation="save",
                tier="memory",
                hint="see whether the node is out of memory or of processor time",
            )

    @property
    def is_busy(self) -> bool:
        """Whether anything runs."""
        return any(not future.done() for _, future in self._tasks)

    def is_running(self, name: str) -> bool:
        """Whether the end of the save of that name still runs."""
        return any(task == name and not future.done() for task, future in self._tasks)

    def close(self) -> None:
        """Ends the thread, once it has nothing to do; a later task begins another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            # One that has hung is not waited for once more.
            pool.shutdown(wait=not self.is_busy)
            self._thread = None
