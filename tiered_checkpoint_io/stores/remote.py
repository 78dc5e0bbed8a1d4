"""RemoteStore: a durable tier at any fsspec URL."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreError, without_secrets
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import hash_bytes
from tiered_checkpoint_io.stores.base import UploadContent, check_size, too_short
from tiered_checkpoint_io.stores.files import FileStore, reason_of

_MIB = 1 << 20
#: Bytes of one read or write: more would be held twice, as fsspec returns them in a buffer of its own.
_SLICE = 16 * _MIB
#: Part size of uploads to object stores; raised for large objects, which may have 10,000 parts.
_BLOCK = 64 * _MIB
_MAX_BLOCKS = 9_000
#: Object stores, in which a written object appears at once, when the file is closed.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
#: Schemes with one connection for all calls.
_ONE_AT_A_TIME = {"ftp", "sftp", "ssh"}


class RemoteStore(FileStore):
    """Objects as files of an fsspec file system.

    In object stores a write appears whole, when it is closed. In other file systems it goes to another name and is
    moved; if a file system cannot move onto an existing file, the old file is removed right before. No commit depends
    on create-only writes, which fsspec does not have.
    """

    def __init__(self, url: str, *, clock: Clock = SYSTEM, **options: Any) -> None:
        """Opens the file system, whose constructor gets ``options``; sends no request.

        Raises ImportError if the package for this kind of URL is missing, StoreError if fsspec does not know this kind.
        """
        shown = without_secrets(url.rstrip("/") if not url.endswith("://") else url)
        try:
            # A file system of our own: its caches and sessions end with this store.
            self._open = functools.partial(fsspec.core.url_to_fs, url, skip_instance_cache=True, **options)
            opened, root = self._open()
        except ValueError as error:
            raise StoreError(
                "fsspec cannot open this URL", operation="connect", key=shown, hint="check dirpath", reason="config"
            ) from error
        super().__init__(shown, str(root).rstrip("/"), clock)
        self._fs, self._opening = opened, threading.Lock()
        self._opened_at = clock.monotonic()
        scheme = ids.url_scheme(url) or ""
        self._is_object_store = scheme in _OBJECT_STORES
        if scheme in _ONE_AT_A_TIME:
            self._turn = threading.RLock()

    def _renewed(self, refused: Any) -> bool:
        # File systems look for credentials when they are made; of most, these can't be compared.
        with self._opening:
            now = self._clock.monotonic()
            if self._fs is refused and now - self._opened_at >= self._clock.timing.credentials_again_s:
                self._opened_at = now
                # If there are no credentials just now, the refusal says more.
                with contextlib.suppress(Exception):
                    self._fs, _ = self._open()
            return self._fs is not refused

    def _files(self, folder: str) -> Iterator[tuple[str, int, float]]:
        found = self._find(folder)
        if not found and self._is_object_store:
            self._check_bucket()
        for path, facts in found.items():
            yield str(path), int(facts.get("size") or 0), _modified(facts)

    def _get(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(path))

    def _size(self, path: str) -> int:
        self._fs.invalidate_cache()
        facts = self._fs.info(path)
        if facts.get("type") == "directory":
            raise IsADirectoryError(path)
        return int(facts["size"])

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        path = self._path(key)
        if not len(buffer):
            self.size(key)
        for start in range(0, len(buffer), _SLICE):
            with buffer[start : start + _SLICE] as piece:
                self._ask("get", key, lambda: self._read(key, path, offset + start, piece))  # noqa: B023 - called here
                self.metrics.add("bytes.down", len(piece))

    def _read(self, key: str, path: str, offset: int, piece: memoryview) -> None:
        end = offset + len(piece)
        data = b""
        try:
            data = self._fs.cat_file(path, start=offset, end=end)
        except Exception as error:
            # A range past the end is another error in each file system.
            if reason_of(error) is not None or self.size(key) >= end:
                raise
        if len(data) != len(piece):
            # fsspec does not distinguish a short object from an answer that was cut short.
            size = self.size(key)
            if size >= end:
                raise StoreError("the answer was cut short", operation="read", key=key, reason="unavailable")
            raise too_short(key, size, end)
        piece[:] = data

    def _write(self, key: str, path: str, data: UploadContent, report: Callable[[int], None]) -> None:
        if self._is_object_store:
            blocks = -(-len(data) // (_MAX_BLOCKS * _MIB))
            self._send(key, path, data, report, block_size=max(_BLOCK, blocks * _MIB), autocommit=False)
            return
        with self._moved("put", key, path, self._clock.token(12)) as scratch:
            self._send(key, scratch, data, report)

    def _send(self, key: str, path: str, data: UploadContent, report: Callable[[int], None], **options: Any) -> None:
        with self._guarded("put", key):
            file = self._fs.open(path, "wb", **options)
        try:
            for start in range(0, len(data), _SLICE):
                with data[start : start + _SLICE] as piece, self._guarded("put", key):
                    # Not every file system takes memoryviews.
                    count = file.write(bytes(piece)) or len(piece)
                report(count)
            with self._guarded("put", key):
                file.close()
                if not options.get("autocommit", True):
                    file.commit()
        except BaseException:
            _throw_away(file)
            raise

    def _copy(self, key: str, source: str, path: str, size: int, check: Callable[[], None]) -> None:
        # By way of another name, so that the target changes at once, and only to the checked copy. One for each target:
        # the next copy replaces the remains of a crash in a bucket.
        with self._moved("copy", key, path, f"copy-{hash_bytes(path.encode())}") as scratch:
            with self._guarded("copy", key):
                self._fs.cp_file(source, scratch)
                found = self._size(scratch)
            check_size(key, found, size)
            check()

    @contextlib.contextmanager
    def _moved(self, operation: str, key: str, target: str, name: str) -> Iterator[str]:
        """Yields a path in the scratch folder, whose file is moved to its place after the block."""
        scratch = f"{self._scratch}/{name}"
        try:
            with self._guarded(operation, key):
                for folder in () if self._is_object_store else (self._scratch, target.rpartition("/")[0]):
                    self._fs.makedirs(folder, exist_ok=True)
            yield scratch
            with self._guarded(operation, key):
                self._move_over(scratch, target)
        except BaseException:
            # The first error is the one to raise: remains are removed later, by their age.
            with contextlib.suppress(Exception):
                self._fs.rm_file(scratch)
            raise

    def _move_over(self, source: str, target: str) -> None:
        try:
            self._move(source, target)
        except FileExistsError:
            self._fs.rm_file(target)
            self._move(source, target)

    def _move(self, source: str, target: str) -> None:
        if type(self._fs).mv is AbstractFileSystem.mv:
            # This default method takes its arguments for patterns.
            self._fs.cp_file(source, target)
            self._fs.rm_file(source)
        else:
            self._fs.mv(source, target)

    def _delete(self, path: str) -> None:
        self._fs.rm_file(path)

    def _drop_abandoned(self) -> None:
        if self._is_object_store:
            return
        for path, facts in self._find(self._scratch).items():
            if 0 < _modified(facts) < self._clock.wall() - self._clock.timing.abandoned_s:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            if self._is_object_store:
                found = self._fs.find(folder, detail=True)
                # For a blob with the folder's own name, adlfs lists just this blob, which is not in the folder.
                return {path: found[path] for path in found if path != folder}
            # In other file systems fsspec's own would leave out folders that it cannot list.
            entries = self._fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {}
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[name] = entry
            elif name != folder:
                found |= self._find(name)
        return found

    def _check_bucket(self) -> None:
        """Distinguishes an empty prefix from a missing bucket."""
        bucket = self._root.lstrip("/").partition("/")[0]
        # gcsfs says that a bucket is missing also if it may not look at it.
        for look in (self._fs.info, self._fs.ls):
            try:
                look(bucket)
            except Exception as error:
                missing, reason = error, reason_of(error)
                # One may list a prefix, and not look at the bucket.
                if reason == "access":
                    return
                if reason != "missing":
                    raise
            else:
                return
        raise StoreError(
            f"bucket {bucket!r} does not exist there", operation="list", key=self.url, reason="config"
        ) from missing


def _throw_away(file: Any) -> None:
    """Ends a file half written, without making it real as an ordinary close would."""
    # The first error is the one to raise.
    with contextlib.suppress(Exception):
        file.discard()
    if isinstance(file, AbstractBufferedFile):
        file.closed = True
    else:
        with contextlib.suppress(Exception):
            file.close()


def _modified(facts: dict[str, Any]) -> float:
    for field in ("LastModified", "last_modified", "modified", "updated", "mtime", "created"):
        value = facts.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return 0.0
