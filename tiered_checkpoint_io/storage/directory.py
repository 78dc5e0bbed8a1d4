"""DirectoryStore: a durable tier in a directory of a local or network file system."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    InvalidNameError,
    StoreAccessError,
    StoreError,
    StoreNotFoundError,
)
from tiered_checkpoint_io.storage.base import Metrics, ObjectInfo, UploadJournal

_SLICE = 8 << 20
_TEMPORARY = ".tiered-tmp-"
#: An abandoned temporary file is older than any write that still makes progress.
_STALE_S = 24 * 3600.0


class DirectoryStore:
    """Objects as files: written beside their place, synced, renamed, and the folder synced."""

    def __init__(self, root: str, *, metrics: Metrics | None = None) -> None:
        self._root = os.path.abspath(root)
        self._metrics = metrics or Metrics()

    @property
    def url(self) -> str:
        return self._root

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._metrics.add("requests.list")
        start = self._path(prefix.rpartition("/")[0])
        for base, _, files in os.walk(start, onerror=self._walk_error):
            for name in files:
                path = os.path.join(base, name)
                key = os.path.relpath(path, self._root).replace(os.sep, "/")
                if name.startswith(_TEMPORARY):
                    self._drop_stale(path)
                elif key.startswith(prefix):
                    # A file that is replaced or removed while we look is seen by the next list.
                    with contextlib.suppress(FileNotFoundError):
                        facts = os.stat(path)
                        yield ObjectInfo(key, facts.st_size, facts.st_mtime)

    def get(self, key: str) -> bytes:
        self._metrics.add("requests.get")
        try:
            with open(self._path(key), "rb") as file:
                data = file.read()
        except OSError as error:
            _translate(error, "get", key)
        self._metrics.add("bytes.down", len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._metrics.add("requests.put")
        self._write(key, memoryview(data), None)

    def size(self, key: str) -> int:
        self._metrics.add("requests.head")
        try:
            return os.stat(self._path(key)).st_size
        except OSError as error:
            _translate(error, "size", key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._metrics.add("requests.get")
        done = 0
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                file.seek(offset)
                while done < len(buffer):
                    count = file.readinto(buffer[done:])
                    if not count:
                        raise CorruptCheckpointError(
                            f"object ends at byte {offset + done}; {offset + len(buffer)} were expected",
                            operation="read",
                            tier="durable",
                            key=key,
                        )
                    done += count
        except OSError as error:
            _translate(error, "read", key)
        self._metrics.add("bytes.down", done)

    def upload(
        self,
        key: str,
        data: memoryview,
        *,
        journal: UploadJournal | None = None,  # noqa: ARG002 - a local write restarts
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._metrics.add("requests.put")
        self._write(key, data, progress)

    def abandon(self, key: str, journal: UploadJournal) -> None:  # noqa: ARG002 - nothing is kept
        journal.clear()

    def delete(self, key: str) -> None:
        self._metrics.add("requests.delete")
        path = self._path(key)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _translate(error, "delete", key)
        _sync_folder(os.path.dirname(path))
        # Folders exist for their files alone here; the last one gone, they go too.
        folder = os.path.dirname(path)
        while folder.startswith(self._root + os.sep):
            try:
                os.rmdir(folder)
            except OSError:
                break
            folder = os.path.dirname(folder)

    def close(self) -> None:
        """Nothing to free."""

    def _path(self, key: str) -> str:
        if ".." in key.split("/") or key.startswith("/"):
            raise InvalidNameError(f"key {key!r} leaves the store", hint="keys are relative to the store's root")
        return os.path.join(self._root, *key.split("/")) if key else self._root

    def _write(self, key: str, data: memoryview, progress: Callable[[int], None] | None) -> None:
        path = self._path(key)
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            os.makedirs(folder, exist_ok=True)
            try:
                with open(temporary, "xb", buffering=0) as file:
                    for start in range(0, len(data), _SLICE):
                        piece = data[start : start + _SLICE]
                        done = 0
                        while done < len(piece):
                            done += file.write(piece[done:])
                        if progress is not None:
                            progress(done)
                    os.fsync(file.fileno())
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
            _sync_folder(folder)
        except OSError as error:
            _translate(error, "put", key)
        self._metrics.add("bytes.up", len(data))

    def _drop_stale(self, path: str) -> None:
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime > _STALE_S:
                os.unlink(path)

    def _walk_error(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            _translate(error, "list", str(error.filename))


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _translate(error: OSError, operation: str, key: str) -> NoReturn:
    if isinstance(error, StoreError):
        raise error
    kind: type[StoreError] = StoreError
    hint = None
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        kind = StoreNotFoundError
    elif isinstance(error, PermissionError) or error.errno == 30:
        kind, hint = StoreAccessError, "check the owner and mode of dirpath"
    raise kind(
        f"{operation} failed: {error.strerror or error}", operation=operation, tier="durable", key=key, hint=hint
    ) from error
