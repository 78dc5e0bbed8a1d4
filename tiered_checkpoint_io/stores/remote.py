"""RemoteStore: a durable tier at any fsspec URL."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    InvalidNameError,
    StoreAccessError,
    StoreConfigError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Content, Metrics, ObjectInfo, UploadJournal, validate_key

_MIB = 1 << 20
_SLICE = 16 * _MIB
#: Part size of uploads to object stores; raised for large objects, which may have 10,000 parts.
_BLOCK = 64 * _MIB
_MAX_BLOCKS = 9_000
#: Object stores, where what is written appears when the file is closed, whole.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
#: Where one connection serves all calls.
_ONE_AT_A_TIME = {"ftp", "sftp", "ssh"}
#: Files on their way, where a file appears before it is whole.
_SCRATCH = ids.META_PREFIX + "tmp"

_RETRYABLE_STATUS = {408, 429, 500, 502, 503, 504}
_RETRYABLE_ERRNO = {errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT}
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class RemoteStore:
    """Objects as files of an fsspec file system.

    In object stores a write appears whole, when it is closed. Elsewhere it goes to another name
    and is moved; where a file system cannot move onto what is there, the old file is removed right
    before. No commit depends on create-only writes, which fsspec does not have.
    """

    def __init__(self, url: str, *, metrics: Metrics | None = None, clock: Clock = SYSTEM, **options: Any) -> None:
        """Opens the file system; asks nothing of it.

        Args:
            url: Any URL that fsspec knows.
            metrics: Counters; new ones by default.
            clock: For the age of what dead writers left.
            options: For the file system's constructor.

        Raises:
            ImportError: The package for this kind of URL is missing.
            StoreConfigError: fsspec does not know this kind of URL.
        """
        self._url = _without_secrets(url.rstrip("/") if not url.endswith("://") else url)
        self._metrics = metrics or Metrics()
        self._clock = clock
        try:
            # A file system of our own: its caches and sessions end with this store.
            self._fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        except ValueError as error:
            raise StoreConfigError(
                "fsspec cannot open this URL", operation="connect", tier="durable", key=self._url, hint="check dirpath"
            ) from error
        self._root = str(root).rstrip("/")
        scheme = ids.url_scheme(url) or ""
        self._is_object_store = scheme in _OBJECT_STORES
        self._is_memory = scheme == "memory"
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if scheme in _ONE_AT_A_TIME else contextlib.nullcontext()
        )
        self._cleaned = False

    @property
    def url(self) -> str:
        return self._url

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._metrics.add("requests.list")
        folder = prefix.rpartition("/")[0]
        with self._asking("list", prefix):
            found = self._find(self._path(folder) if folder else self._root)
            if not found and self._is_object_store:
                self._check_bucket()
        for path, facts in found.items():
            key = str(path)[len(self._root) :].lstrip("/")
            if key.startswith(prefix) and not key.startswith(_SCRATCH + "/"):
                yield ObjectInfo(key, int(facts.get("size") or 0), _modified(facts))

    def get(self, key: str) -> bytes:
        self._metrics.add("requests.get")
        with self._asking("get", key):
            data = bytes(self._fs.cat_file(self._path(key)))
        self._metrics.add("bytes.down", len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self.upload(key, memoryview(data))

    def size(self, key: str) -> int:
        self._metrics.add("requests.head")
        with self._asking("size", key):
            self._fs.invalidate_cache()
            facts = self._fs.info(self._path(key))
            if facts.get("type") == "directory":
                raise IsADirectoryError(key)
            return int(facts["size"])

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if not len(buffer):
            self.size(key)
            return
        for start in range(0, len(buffer), _SLICE):
            with buffer[start : start + _SLICE] as piece:
                self._read_piece(key, offset + start, piece)

    def _read_piece(self, key: str, offset: int, piece: memoryview) -> None:
        self._metrics.add("requests.get")
        end = offset + len(piece)
        data = b""
        try:
            with self._turn:
                data = self._fs.cat_file(self._path(key), start=offset, end=end)
        except TieredCheckpointError:
            raise
        except Exception as error:
            # A range behind the end is an error of its own in each file system.
            if _kind(error) is not StoreError or self.size(key) >= end:
                _translate(error, "read", key)
        if len(data) != len(piece):
            # fsspec does not distinguish a short object from an answer that was cut short.
            size = self.size(key)
            if size >= end:
                raise StoreUnavailableError("the answer was cut short", operation="read", tier="durable", key=key)
            raise CorruptCheckpointError(
                f"object ends at byte {size}; {end} were expected", operation="read", tier="durable", key=key
            )
        piece[:] = data
        self._metrics.add("bytes.down", len(data))

    def upload(
        self,
        key: str,
        data: Content,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._metrics.add("requests.put")
        target = self._path(key)
        report = progress or _say_nothing
        with self._turn:
            if self._is_memory:
                # Its files appear as soon as they are opened, unless they come with their content.
                report(len(data))
                with data[0 : len(data)] as whole:
                    self._fs.pipe_file(target, bytes(whole))
            elif self._is_object_store:
                blocks = -(-len(data) // (_MAX_BLOCKS * _MIB))
                self._write(key, target, data, report, block_size=max(_BLOCK, blocks * _MIB), autocommit=False)
            else:
                self._write_and_move(key, target, data, report)
        self._metrics.add("bytes.up", len(data))
        if journal is not None:
            # fsspec cannot resume an upload, so we note nothing; other stores may have.
            journal.clear()

    def abandon(self, key: str, journal: UploadJournal) -> None:  # noqa: ARG002 - nothing is kept
        journal.clear()

    def delete(self, key: str) -> None:
        self._metrics.add("requests.delete")
        try:
            with self._asking("delete", key):
                self._fs.rm_file(self._path(key))
        except StoreNotFoundError:
            return

    def close(self) -> None:
        """Frees nothing by itself: fsspec's sessions end when they are no longer referred to."""

    # ----------------------------------------------------------------------------------------- writes
    def _write(self, key: str, path: str, data: Content, report: Callable[[int], None], **options: Any) -> None:
        # Only the file system's errors are translated, not those of the caller's report.
        with self._asking("upload", key):
            file = self._fs.open(path, "wb", **options)
        try:
            for start in range(0, len(data), _SLICE):
                with data[start : start + _SLICE] as piece, self._asking("upload", key):
                    # Not every file system takes memoryviews.
                    count = file.write(bytes(piece)) or len(piece)
                report(count)
            with self._asking("upload", key):
                file.close()
                if not options.get("autocommit", True):
                    file.commit()
        except BaseException:
            _throw_away(file)
            raise

    def _write_and_move(self, key: str, target: str, data: Content, report: Callable[[int], None]) -> None:
        scratch = f"{self._root}/{_SCRATCH}"
        source = f"{scratch}/{self._clock.token(12)}"
        with self._asking("upload", key):
            self._drop_abandoned(scratch)
            for folder in (scratch, target.rpartition("/")[0]):
                self._fs.makedirs(folder, exist_ok=True)
        try:
            self._write(key, source, data, report)
            with self._asking("upload", key):
                try:
                    self._move(source, target)
                except FileExistsError:
                    self._fs.rm_file(target)
                    self._move(source, target)
        except BaseException:
            # Nothing to add to the error that is on its way: what stays is dropped by its age.
            with contextlib.suppress(Exception):
                self._fs.rm_file(source)
            raise

    def _move(self, source: str, target: str) -> None:
        if type(self._fs).mv is AbstractFileSystem.mv:
            # That one takes its arguments for patterns.
            self._fs.cp_file(source, target)
            self._fs.rm_file(source)
        else:
            self._fs.mv(source, target)

    def _drop_abandoned(self, scratch: str) -> None:
        if self._cleaned:
            return
        self._cleaned = True
        for path, facts in self._find(scratch).items():
            if 0 < _modified(facts) < self._clock.wall() - self._clock.timing.abandoned_s:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

    # ---------------------------------------------------------------------------------------- helpers
    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        return found

    def _check_bucket(self) -> None:
        """Distinguishes an empty prefix from a missing bucket."""
        bucket = self._root.lstrip("/").partition("/")[0]
        try:
            self._fs.info(bucket)
        except FileNotFoundError as error:
            raise StoreConfigError(
                f"bucket {bucket!r} does not exist there", operation="list", tier="durable", key=self._url
            ) from error
        except PermissionError:
            # One may list a prefix and not look at the bucket.
            return

    def _path(self, key: str) -> str:
        if f"{validate_key(key)}/".startswith(_SCRATCH + "/"):
            raise InvalidNameError(f"key {key!r} lies in the store's own folder {_SCRATCH!r}")
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _asking(self, operation: str, key: str) -> Iterator[None]:
        try:
            with self._turn:
                yield
        except TieredCheckpointError:
            raise
        except Exception as error:
            _translate(error, operation, key)


def _say_nothing(_: int) -> None:
    """Progress that is not reported."""


def _throw_away(file: Any) -> None:
    """Ends a file half written, without making it real as an ordinary close would."""
    # Nothing to add to the error that is on its way.
    with contextlib.suppress(Exception):
        file.discard()
    if isinstance(file, AbstractBufferedFile):
        file.closed = True
    else:
        with contextlib.suppress(Exception):
            file.close()


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    if parts.username is None and parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


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


def _status(error: Exception) -> int | None:
    """The HTTP status that an error carries, as those of gcsfs, adlfs, aiohttp and requests do."""
    for holder in (error, getattr(error, "response", None)):
        for field in ("status_code", "status", "code"):
            value = getattr(holder, field, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


def _kind(error: Exception) -> type[StoreError]:
    """Which of our errors a file system's error is: by type, HTTP status and errno, never by text."""
    status = _status(error)
    if isinstance(error, _MISSING) or status == 404:
        return StoreNotFoundError
    if isinstance(error, PermissionError) or status in (401, 403):
        return StoreAccessError
    if isinstance(error, TimeoutError | ConnectionError) or status in _RETRYABLE_STATUS:
        return StoreUnavailableError
    if isinstance(error, OSError) and error.errno in _RETRYABLE_ERRNO:
        return StoreUnavailableError
    # The names of exceptions in libraries that may not be installed, so that they are not imported.
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if names & {"botocore.NoCredentialsError", "botocore.PartialCredentialsError", "google.DefaultCredentialsError"}:
        return StoreAccessError
    if names & {
        "asyncio.TimeoutError",
        "aiohttp.ClientConnectionError",
        "aiohttp.ClientPayloadError",
        "botocore.ConnectionError",
        "botocore.HTTPClientError",
        "paramiko.SSHException",
        "requests.ConnectionError",
        "requests.Timeout",
        "urllib3.HTTPError",
    }:
        return StoreUnavailableError
    return StoreError


def _translate(error: Exception, operation: str, key: str) -> NoReturn:
    kind = _kind(error)
    hint = {
        StoreAccessError: "check the credentials, and their rights on this place",
        StoreUnavailableError: "check the network and the server",
    }.get(kind)
    if kind is StoreNotFoundError and operation == "upload":
        kind, hint = StoreConfigError, "the bucket or folder to write to does not exist; check dirpath"
    # The text of others may hold credentials (URLs do), so just what kind of error it is goes on.
    detail = type(error).__name__
    status = _status(error)
    if status is not None:
        detail += f", HTTP {status}"
    elif isinstance(error, OSError) and error.errno:
        detail += f", {errno.errorcode.get(error.errno, error.errno)}"
    raise kind(f"{operation} failed ({detail})", operation=operation, tier="durable", key=key, hint=hint) from error
