"""FaultyStore: fails, or kills its process, at a chosen operation."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

from tiered_checkpoint_io.errors import StoreUnavailableError
from tiered_checkpoint_io.storage.base import Metrics, ObjectInfo, Store, UploadJournal


class Injected(StoreUnavailableError):  # noqa: N818 - says what it is
    """The failure that was asked for."""


class FaultyStore:
    """A store that works until its ``fail_at``-th operation, and fails from there on."""

    def __init__(
        self, store: Store, *, fail_at: int = 0, kill: bool = False, only: Callable[[str, str], bool] | None = None
    ) -> None:
        """Wraps a store.

        Args:
            store: The real one.
            fail_at: The first operation that fails, from 1; 0 for none.
            kill: Whether to kill the process (SIGKILL) there, in place of raising.
            only: Counts just the operations, by operation and key, for which this is true.
        """
        self._store = store
        self._fail_at = fail_at
        self._kill = kill
        self._only = only
        self._lock = threading.Lock()
        self.operations = 0

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def metrics(self) -> Metrics:
        return self._store.metrics

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._count("list", prefix)
        return self._store.list(prefix)

    def get(self, key: str) -> bytes:
        self._count("get", key)
        return self._store.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._count("put", key)
        self._store.put(key, data)

    def size(self, key: str) -> int:
        self._count("size", key)
        return self._store.size(key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._count("read", key)
        self._store.read_into(key, offset, buffer)

    def upload(
        self,
        key: str,
        data: memoryview,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._count("upload", key)
        self._store.upload(key, data, journal=journal, progress=progress)

    def abandon(self, key: str, journal: UploadJournal) -> None:
        self._count("abandon", key)
        self._store.abandon(key, journal)

    def delete(self, key: str) -> None:
        self._count("delete", key)
        self._store.delete(key)

    def close(self) -> None:
        self._store.close()

    def _count(self, operation: str, key: str) -> None:
        if self._only is not None and not self._only(operation, key):
            return
        with self._lock:
            self.operations += 1
            due = 0 < self._fail_at <= self.operations
        if due and self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if due:
            raise Injected(f"injected at operation {self.operations}", operation=operation, key=key)
