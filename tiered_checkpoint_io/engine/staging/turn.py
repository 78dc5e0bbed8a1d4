"""One save, alias or removal of a process at a time, for all its threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tiered_checkpoint_io.errors import ConfigError, SaveError


class Turn:
    """Ids, slots and retention are of one operation at a time: other threads wait for their turn."""

    def __init__(self, timeout_s: float) -> None:
        """Takes the bound of each wait, seconds."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._thread: int | None = None

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Runs the block while no other thread has a turn; ``name`` is the checkpoint's, for errors.

        Raises:
            ConfigError: This thread has a turn: a signal handler saves while it interrupts a save.
            SaveError: Another thread's turn has not ended within the bound.
        """
        if self._thread == threading.get_ident():
            raise ConfigError(
                f"{name} is to be saved or removed in the middle of another save of the same thread",
                operation="save",
                hint="a signal handler should only note the signal, and save later, as PreemptionCheckpoint does",
            )
        if not self._lock.acquire(timeout=self._timeout_s):
            raise SaveError(
                f"{name} has waited {self._timeout_s:.0f} s for the save of another thread",
                operation="save",
                hint="see whether the node is out of memory or of processor time",
            )
        try:
            self._thread = threading.get_ident()
            yield
        finally:
            self._thread = None
            self._lock.release()
