"""A client of the key-value store of torch.distributed whose requests all have a bound.

The store answers at once, unless its host can't be reached: then torch's own client waits until the kernel gives the
connection up, a quarter of an hour later. So a thread of this client makes the requests, and the caller does not wait
for a late answer. A late answer ends the connection; the next request is made over another.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from datetime import timedelta
from typing import Any, TypeVar

from tiered_checkpoint_io.errors import TieredCheckpointError

_T = TypeVar("_T")
#: Value that no key has; the store returns it for a key without a value, if this value was expected.
_NO_VALUE = "\0"
_Requests = queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None]


class PeerError(TieredCheckpointError, RuntimeError):
    """A part did not get to another node's memory, or did not come from there."""


class LostStoreError(PeerError):
    """The store can't be asked: the rank that holds it has ended, or can't be reached."""


class StoreClient:
    """A connection to the store; its methods, which threads may share, raise :class:`LostStoreError`."""

    def __init__(self, origin: Any, prefix: str, *, timeout_s: float) -> None:
        """Asks nothing yet.

        Args:
            origin: The store. The client makes a connection of its own, because each call locks its connection.
            prefix: Prefix of all keys.
            timeout_s: Bound of each request, seconds.
        """
        self._origin = origin
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        #: Requests of the open connection.
        self._requests: _Requests | None = None
        self._thread: threading.Thread | None = None

    def get(self, key: str) -> str | None:
        """Returns the value of a key; None if it has none."""
        # The store's own get waits for a key that is not there, also for one that is removed right after a look.
        found = self.swap(key, _NO_VALUE, _NO_VALUE)
        return found if found != _NO_VALUE else None

    def set(self, key: str, value: str = "-") -> None:
        """Sets a key; not to an empty value, which would look like none."""
        self.ask(lambda store: store.set(key, value))

    def swap(self, key: str, expected: str, value: str) -> str:
        """Sets a key if it has the expected value; returns the value that it has then."""
        found: bytes = self.ask(lambda store: store.compare_set(key, expected, value))
        return found.decode()

    def add(self, key: str, count: int = 1) -> int:
        """Counts, for all ranks together; returns the count."""
        total: int = self.ask(lambda store: store.add(key, count))
        return total

    def forget(self, *keys: str) -> None:
        """Removes keys that no rank needs any more; does nothing if the store can't remove them, or does not answer."""
        with contextlib.suppress(LostStoreError):
            self.ask(lambda store: [store.delete_key(key) for key in keys])

    def connect(self) -> Any:
        """Returns a further connection to the store."""
        return self.ask(lambda _: self._connect())

    def ask(self, request: Callable[[Any], _T]) -> _T:
        """Returns the result of ``request``, a call that takes the store."""
        answer: Future[_T] = Future()
        requests: _Requests | None = None
        try:
            with self._lock:
                requests = self._open()
                requests.put((request, answer))
            return answer.result(self._timeout_s)
        except Exception as error:
            answer.cancel()
            with self._lock:
                if self._requests is requests:
                    self._end()
            late = isinstance(error, LateError)
            why = f"no answer within {self._timeout_s:.0f} s" if late else str(error).partition("\n")[0]
            raise LostStoreError(
                f"the store of torch.distributed can't be asked: {why}",
                operation="agree",
                hint="the rank that holds it has ended, or its host can't be reached",
            ) from error

    def close(self) -> None:
        """Ends the connection, and the thread unless it waits for an answer that does not come."""
        with self._lock:
            thread = self._thread
            self._end()
        if thread is not None:
            thread.join(self._timeout_s)

    def _open(self) -> _Requests:
        if self._requests is None:
            self._requests = queue.SimpleQueue()
            # A daemon: a call without an answer must not keep the process alive.
            self._thread = threading.Thread(target=self._work, args=(self._requests,), name="tiered-store", daemon=True)
            self._thread.start()
        return self._requests

    def _end(self) -> None:
        requests, self._requests, self._thread = self._requests, None, None
        if requests is not None:
            requests.put(None)

    def _work(self, requests: _Requests) -> None:
        store: Any = None
        while (asked := requests.get()) is not None:
            request, answer = asked
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if store is None:
                    store = self._connect()
                answer.set_result(request(store))
            except BaseException as error:
                answer.set_exception(error)

    def _connect(self) -> Any:
        from torch.distributed import distributed_c10d

        store = self._origin
        if hasattr(store, "clone"):
            store = store.clone()
            store.set_timeout(timedelta(seconds=self._timeout_s))
        return distributed_c10d.PrefixStore(self._prefix, store)
