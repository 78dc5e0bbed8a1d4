"""RemoteStore: a durable tier at any fsspec URL."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import fsspec

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    StoreAccessError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
)
from tiered_checkpoint_io.storage.base import Metrics, ObjectInfo, UploadJournal

_SLICE = 16 << 20
#: Object stores: what is written appears when the file is closed, whole. Elsewhere we write under
#: another name and move.
_ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2"}
_TEMPORARY = ".tiered-tmp-"


class RemoteStore:
    """Objects as files of an fsspec file system.

    fsspec has no reliable create-only write, and none is used: no commit depends on it.
    """

    def __init__(self, url: str, *, metrics: Metrics | None = None, **options: Any) -> None:
        """Opens the file system; asks nothing of it.

        Args:
            url: Any URL that fsspec knows.
            metrics: Counters; new ones by default.
            options: For the file system's constructor.
        """
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self._metrics = metrics or Metrics()
        self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._root = str(root).rstrip("/")
        self._atomic = (ids.url_scheme(url) or "") in _ATOMIC

    @property
    def url(self) -> str:
        return self._url

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._metrics.add("requests.list")
        folder = prefix.rpartition("/")[0]
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return
        except Exception as error:
            _translate(error, "list", prefix)
        for path, facts in found.items():
            key = str(path)[len(self._root) :].lstrip("/")
            if key.startswith(prefix) and not key.rpartition("/")[2].startswith(_TEMPORARY):
                yield ObjectInfo(key, int(facts.get("size") or 0), _modified(facts))

    def get(self, key: str) -> bytes:
        self._metrics.add("requests.get")
        try:
            data = bytes(self._fs.cat_file(self._path(key)))
        except Exception as error:
            _translate(error, "get", key)
        self._metrics.add("bytes.down", len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self.upload(key, memoryview(data))

    def size(self, key: str) -> int:
        self._metrics.add("requests.head")
        try:
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(key))["size"])
        except Exception as error:
            _translate(error, "size", key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        self._metrics.add("requests.get")
        try:
            data = self._fs.cat_file(self._path(key), start=offset, end=offset + len(buffer))
        except Exception as error:
            _translate(error, "read", key)
        if len(data) != len(buffer):
            # Ranged reads are not validated by fsspec: a short one is a short object.
            raise CorruptCheckpointError(
                f"object ends at byte {offset + len(data)}; {offset + len(buffer)} were expected",
                operation="read",
                tier="durable",
                key=key,
            )
        buffer[:] = data
        self._metrics.add("bytes.down", len(data))

    def upload(
        self,
        key: str,
        data: memoryview,
        *,
        journal: UploadJournal | None = None,  # noqa: ARG002 - fsspec can't take up an upload
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._metrics.add("requests.put")
        target = self._path(key)
        folder, _, _ = target.rpartition("/")
        path = target if self._atomic else f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        with _translated("put", key):
            if not self._atomic:
                self._fs.makedirs(folder, exist_ok=True)
            file = self._fs.open(path, "wb", autocommit=False)
        try:
            for start in range(0, len(data), _SLICE):
                piece = data[start : start + _SLICE]
                with _translated("put", key):
                    # Not every file system takes memoryviews.
                    file.write(bytes(piece))
                if progress is not None:
                    progress(len(piece))
        except BaseException:
            # An ordinary close would make half an object real.
            with contextlib.suppress(Exception):
                file.close()
            with contextlib.suppress(Exception):
                file.discard()
            raise
        with _translated("put", key):
            file.close()
            file.commit()
            if not self._atomic:
                self._fs.mv(path, target)
        self._metrics.add("bytes.up", len(data))

    def abandon(self, key: str, journal: UploadJournal) -> None:  # noqa: ARG002 - nothing is kept
        journal.clear()

    def delete(self, key: str) -> None:
        self._metrics.add("requests.delete")
        try:
            self._fs.rm_file(self._path(key))
        except FileNotFoundError:
            return
        except Exception as error:
            _translate(error, "delete", key)

    def close(self) -> None:
        """Nothing to free: fsspec keeps its file systems for the process."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


def _modified(facts: dict[str, Any]) -> float:
    for field in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = facts.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


@contextlib.contextmanager
def _translated(operation: str, key: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _translate(error, operation, key)


def _translate(error: Exception, operation: str, key: str) -> NoReturn:
    if isinstance(error, StoreError):
        raise error
    kind: type[StoreError] = StoreError
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        kind = StoreNotFoundError
    elif isinstance(error, PermissionError):
        kind = StoreAccessError
    elif isinstance(error, TimeoutError | ConnectionError):
        kind = StoreUnavailableError
    raise kind(f"{operation} failed: {error}", operation=operation, tier="durable", key=key) from error
