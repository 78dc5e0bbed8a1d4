"""FaultyStore: fails at a chosen operation."""

import threading

from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.stores.base import ServerCopy, conditional, copy_to


class Injected(StoreError):
    """The failure that was asked for."""

    _reason = "unavailable"


class FaultyStore:
    """A store whose ``fail_at``-th operation fails, from 1, and with ``once`` only that one; 0 for none.

    Operations are counted in the order in which they begin; ``only`` says by operation and key which ones count. An
    operation fails ``before`` the real store is asked, ``after`` it has done its work, as if only the answer is lost,
    or ``during`` an upload, once a part of the bytes is written, and ``before`` all else; ``error`` is what it raises.
    """

    def __init__(self, store, *, fail_at=0, only=lambda operation, key: True, when="before", once=False, error=None):
        self.url, self.metrics, self._error = store.url, store.metrics, error
        self._store, self._fail_at, self._only, self._when, self._once = store, fail_at, only, when, once
        self._lock = threading.Lock()
        self.operations = 0

    def list(self, prefix):
        return self._do("list", prefix, lambda: iter([*self._store.list(prefix)]))

    def upload(self, key, data, *, journal=None, progress=None):
        self._upload(key, lambda report: self._store.upload(key, data, journal=journal, progress=report), progress)

    def upload_if(self, key, data, expected, *, progress=None, **options):
        real = conditional(self._store)
        self._upload(key, lambda report: real.upload_if(key, data, expected, progress=report, **options), progress)

    def copy(self, source, target, size, *, check, **options):
        self._do("copy", target, lambda: copy_to(self._store, target, ServerCopy(source, size, check), **options))

    def close(self):
        self._store.close()

    def _upload(self, key, upload, progress):
        def report(count):
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

    def _do(self, operation, key, call):
        due = self._count(operation, key)
        if due and self._when != "after":
            self._fail(operation, key)
        result = call()
        if due:
            self._fail(operation, key)
        return result

    def _count(self, operation, key):
        if not self._only(operation, key):
            return False
        with self._lock:
            self.operations += 1
            return self.operations == self._fail_at or (not self._once and 0 < self._fail_at < self.operations)

    def _fail(self, operation, key):
        raise self._error or Injected(f"injected at operation {self.operations}", operation=operation, key=key)


def refusing(store, only, error=None):
    """Returns a store that refuses each operation for which ``only`` is true."""
    return FaultyStore(store, fail_at=1, only=only, error=error or StoreError("no", reason="access"))


def _counted(method, operation, of=lambda store: store):
    def call(self, key, *arguments):
        return self._do(operation, key, lambda: getattr(of(self._store), method)(key, *arguments))

    return call


for _name in ("get", "put", "size", "abandon", "delete"):
    setattr(FaultyStore, _name, _counted(_name, _name))
FaultyStore.read_into = _counted("read_into", "read")
for _name, _operation in {"tag": "size", "get_tagged": "get", "put_if": "put", "delete_if": "delete"}.items():
    setattr(FaultyStore, _name, _counted(_name, _operation, conditional))
