"""A client of the key-value store of torch.distributed whose calls all have a bound.

The store answers at once, unless its host can't be reached: then torch's own client waits until the kernel gives the
connection up, a quarter of an hour later. So a thread of this client makes the calls, and the caller goes on without
an answer that is late.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import distributed_c10d

_T = TypeVar("_T")
_Request = tuple[Callable[[Any], object], "queue.SimpleQueue[tuple[object, BaseException | None]]"]


class StoreClient:
    """A connection to the store that makes one call after the other."""

    def __init__(self, origin: Any, prefix: str, *, timeout_s: float) -> None:
        """Begins to connect.

        Args:
            origin: The store. This makes a connection of its own, because a call locks the one it is made over.
            prefix: Of all keys.
            timeout_s: Bound of the connection and of each call, seconds.
        """
        self._timeout_s = timeout_s
        #: None until it is connected.
        self.store: Any = None
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        # A daemon: a call without an answer must not keep the process alive.
        self._thread = threading.Thread(target=self._work, args=(origin, prefix), name="tiered-store", daemon=True)
        self._thread.start()

    def call(self, request: Callable[[Any], _T]) -> _T:
        """What ``request`` gives; close this client where it raises.

        Args:
            request: Takes the store.

        Raises:
            TimeoutError: There is no answer within the bound.
            Exception: What the store raises.
        """
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._requests.put((request, answer))
        try:
            value, error = answer.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer within {self._timeout_s:.0f} s") from None
        if error is not None:
            raise error
        found: _T = value
        return found

    def get(self, key: str) -> bytes | None:
        """The value of a key; None where it has none. Raises as :meth:`call` does."""
        return self.call(lambda store: store.get(key) if store.check([key]) else None)

    def close(self) -> None:
        """Ends the thread, unless it waits for an answer that does not come."""
        self._requests.put(None)
        self._thread.join(self._timeout_s)

    def drop(self) -> None:
        """Ends the thread without waiting for it: it may still wait for an answer."""
        self._requests.put(None)

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
        while (asked := self._requests.get()) is not None:
            request, answer = asked
            try:
                if failed is not None:
                    raise failed
                answer.put((request(self.store), None))
            except BaseException as error:
                answer.put((None, error))
