"""Questions to the key-value store of torch.distributed, each with a bound.

The store answers at once, or its host can't be reached; and then its client waits until the kernel gives the
connection up, a quarter of an hour later. So a thread of its own asks, and whoever waits for the answer goes on
without it when it is late.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import distributed_c10d

_T = TypeVar("_T")
_Question = tuple[Callable[[Any], object], "queue.SimpleQueue[tuple[object, BaseException | None]]"]


class Line:
    """A connection to the store, over which one question is asked after the other."""

    def __init__(self, origin: Any, prefix: str, *, timeout_s: float) -> None:
        """Begins to connect.

        Args:
            origin: The store, of which this gets a connection of its own: who waits for an answer locks it.
            prefix: What stands before all keys.
            timeout_s: Bound of the connection and of each question, seconds.
        """
        self._timeout_s = timeout_s
        #: None until it is connected.
        self.store: Any = None
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        # One that still waits when the process ends is not waited for.
        self._thread = threading.Thread(target=self._work, args=(origin, prefix), name="tiered-ask", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[Any], _T]) -> _T:
        """The answer; the line is of no use any more where this raises.

        Args:
            question: Takes the store.

        Raises:
            TimeoutError: There is none within the bound.
            Exception: What the store raises.
        """
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._questions.put((question, answer))
        try:
            value, error = answer.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer within {self._timeout_s:.0f} s") from None
        if error is not None:
            raise error
        found: _T = value
        return found

    def close(self) -> None:
        """Ends the thread, unless it waits for an answer that does not come."""
        self._questions.put(None)
        self._thread.join(self._timeout_s)

    def drop(self) -> None:
        """Leaves the thread to its wait: it ends behind that."""
        self._questions.put(None)

    def _work(self, origin: Any, prefix: str) -> None:
        failed: BaseException | None = None
        try:
            clone = getattr(origin, "clone", None)
            store = clone() if clone is not None else origin
            if clone is not None:
                store.set_timeout(timedelta(seconds=self._timeout_s))
            self.store = distributed_c10d.PrefixStore(prefix, store)
        except BaseException as error:
            failed = error
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            try:
                if failed is not None:
                    raise failed
                answer.put((question(self.store), None))
            except BaseException as error:
                answer.put((None, error))
