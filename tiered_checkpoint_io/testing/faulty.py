"""FaultyStore: fails at a chosen operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.base import ObjectInfo, ServerCopy, Store, UploadContent, UploadJournal
from tiered_checkpoint_io.stores.fallbacks import conditional, copy_to

_T = TypeVar("_T")


class Injected(StoreError):  # noqa: N818 - says what it is
    """The failure that was asked for."""

    _reason = "unavailable"


class FaultyStore:
    """A store that works until its ``fail_at``-th operation, and fails from there on.

    Operations are counted in the order in which they begin, and nothing else decides. To try every
    point of a procedure, run it once with ``fail_at=0``, read ``operations``, and run it again for
    each number up to that.
    """

    def __init__(
        self,
        store: Store,
        *,
        fail_at: int = 0,
        only: Callable[[str, str], bool] | None = None,
        when: Literal["before", "during", "after"] = "before",
        once: bool = False,
    ) -> None:
        """Wraps a store.

        Args:
            store: The real one.
            fail_at: The first operation that fails, from 1; 0 for none.
            only: Counts just the operations, by operation and key, for which this is true.
            when: ``before`` the real store is asked; ``after`` it has done its work, as when just the answer is
                lost; ``during`` an upload, once a part of the bytes is written, and ``before`` all else.
            once: Whether only the ``fail_at``-th operation fails, and later ones work again.
        """
        self.url = store.url
        self.metrics = store.metrics
        self._store = store
        self._fail_at = fail_at
        self._only = only
        self._when = when
        self._once = once
        self._lock = threading.Lock()
        self.operations = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._do("list", prefix, lambda: iter([*self._store.list(prefix)]))

    def get(self, key: str) -> bytes:
        return self._do("get", key, lambda: self._store.get(key))

    def put(self, key: str, data: bytes) -> None:
        self._do("put", key, lambda: self._store.put(key, data))

    def size(self, key: str) -> int:
        return self._do("size", key, lambda: self._store.size(key))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._do("read", key, lambda: self._store.read_into(key, offset, buffer))

    def upload(
        self,
        key: str,
        data: UploadContent,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._upload(key, lambda report: self._store.upload(key, data, journal=journal, progress=report), progress)

    def _upload(
        self,
        key: str,
        upload: Callable[[Callable[[int], None]], None],
        progress: Callable[[int], None] | None,
    ) -> None:
        def report(count: int) -> None:
            if progress is not None:
                progress(count)
            if due and self._when == "during":
                self._fail("upload", key)

        due = self._count("upload", key)
        if due and self._when == "before":
            self._fail("upload", key)
        upload(report)
        if due:
            self._fail("upload", key)

    def copy(
        self,
        source: str,
        target: str,
        size: int,
        *,
        check: Callable[[], None],
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        copy = ServerCopy(source, size, check)
        self._do("copy", target, lambda: copy_to(self._store, target, copy, journal=journal, progress=progress))

    def abandon(self, key: str, journal: UploadJournal) -> None:
        self._do("abandon", key, lambda: self._store.abandon(key, journal))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._store.delete(key))

    def tag(self, key: str) -> str | None:
        return self._do("size", key, lambda: conditional(self._store).tag(key))

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        return self._do("get", key, lambda: conditional(self._store).get_tagged(key))

    def put_if(self, key: str, data: bytes, expected: str | None) -> str:
        return self._do("put", key, lambda: conditional(self._store).put_if(key, data, expected))

    def upload_if(
        self,
        key: str,
        data: UploadContent,
        expected: str | None,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        def upload(report: Callable[[int], None]) -> None:
            conditional(self._store).upload_if(key, data, expected, journal=journal, progress=report, look=look)

        self._upload(key, upload, progress)

    def delete_if(self, key: str, expected: str) -> None:
        self._do("delete", key, lambda: conditional(self._store).delete_if(key, expected))

    def close(self) -> None:
        self._store.close()

    def _do(self, operation: str, key: str, call: Callable[[], _T]) -> _T:
        due = self._count(operation, key)
        if due and self._when != "after":
            self._fail(operation, key)
        result = call()
        if due:
            self._fail(operation, key)
        return result

    def _count(self, operation: str, key: str) -> bool:
        """Counts an operation; tells whether it is one that fails."""
        if self._only is not None and not self._only(operation, key):
            return False
        with self._lock:
            self.operations += 1
            if self._once:
                return self.operations == self._fail_at
            return 0 < self._fail_at <= self.operations

    def _fail(self, operation: str, key: str) -> None:
        raise Injected(f"injected at operation {self.operations}", operation=operation, key=key)
