"""An event that takes a fraction of the time of ``threading.Event`` to make: each overlapped save makes two."""

from __future__ import annotations

import contextlib
import threading


class Latch:
    """An event that is set once, by any thread; any number of threads wait for it."""

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Returns True if the latch is set."""
        return self._is_set

    def set(self) -> None:
        """Ends all waits, also later ones."""
        self._is_set = True
        self._pass_on()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the latch is set; returns whether it is set by then."""
        if not self._is_set and self._lock.acquire(timeout=timeout_s):
            self._pass_on()
        return self._is_set

    def _pass_on(self) -> None:
        # The lock is free already: a waiting thread has had it meanwhile.
        with contextlib.suppress(RuntimeError):
            self._lock.release()
