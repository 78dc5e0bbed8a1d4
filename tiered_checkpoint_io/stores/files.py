"""FileStore: the common part of stores of files. The public method owns the guard, the subclass the hook."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import ConfigError, Reason, StoreError, StoreNotFoundError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import (
    Metrics,
    ObjectInfo,
    UploadContent,
    UploadJournal,
    store_error,
    validate_key,
)
from tiered_checkpoint_io.stores.retry import Progress, Retry

_T = TypeVar("_T")
_P = ParamSpec("_P")
#: Folder of incomplete files, for file systems in which a file appears before it is complete.
_SCRATCH = ids.META_PREFIX + "tmp"

_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Errors of network file systems whose server is away or busy for a while.
_RETRYABLE_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_RETRYABLE_STATUS = {408, 429, 500, 502, 503, 504}
#: The names of exceptions in libraries that may not be installed, so that they are not imported.
_NO_CREDENTIALS = {"botocore.NoCredentialsError", "botocore.PartialCredentialsError", "google.DefaultCredentialsError"}
_CONNECTION_LOST = {
    "asyncio.TimeoutError",
    "aiohttp.ClientConnectionError",
    "aiohttp.ClientPayloadError",
    "azure.IncompleteReadError",
    "azure.ServiceRequestError",
    "azure.ServiceResponseError",
    "botocore.ConnectionError",
    "botocore.HTTPClientError",
    "google.TransportError",
    "paramiko.SSHException",
    "requests.ConnectionError",
    "requests.Timeout",
    "urllib3.HTTPError",
}


class FileStore(ABC):
    """A store of files. Uploads cannot be resumed, so journals stay empty."""

    #: Errors that calls of the file system raise.
    _errors: type[Exception] = Exception
    _access_hint = "check the credentials, and their rights on this place"
    _network_hint = "check the network and the server"

    def __init__(self, url: str, root: str, clock: Clock) -> None:
        """Makes no folder; ``root`` is a path within the file system, without a slash at its end."""
        self.url = url
        self.metrics = Metrics()
        self._root = root
        self._scratch = f"{root}/{_SCRATCH}"
        self._clock = clock
        self._retry = Retry(self.metrics, clock)
        self._cleaned = False
        #: Object that makes the calls, if it has credentials.
        self._fs: Any = None
        #: Held during each call, if one connection serves all.
        self._turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        path = self._path(folder) if folder else self._root
        # A listing that fails half way begins again: its entries are yielded only once it is complete.
        for found, size, modified in self._ask("list", prefix, lambda: [*self._files(path)]):
            key = found[len(self._root) :].lstrip("/")
            if key.startswith(prefix) and not key.startswith(_SCRATCH + "/"):
                yield ObjectInfo(key, size, modified)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        data = self._ask("get", key, lambda: self._get(path))
        self.metrics.add("bytes.down", len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self.upload(key, memoryview(data))

    def size(self, key: str) -> int:
        path = self._path(key)
        return self._ask("head", key, lambda: self._size(path))

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None: ...

    def upload(
        self,
        key: str,
        data: UploadContent,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        path = self._path(key)
        self._upload(key, data, lambda report: self._write(key, path, data, report), journal, progress)

    def _upload(
        self,
        key: str,
        data: UploadContent,
        write: Callable[[Callable[[int], None]], _T],
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> _T:
        """Uploads through ``write``, which gets a callback for progress; does the common part of all uploads."""
        report, cancelled = Progress(progress), threading.Event()

        def once() -> _T:
            self.metrics.add("requests.put")
            report.restart()
            with self._turn:
                if not self._cleaned:
                    with self._guarded("put", key):
                        self._drop_abandoned()
                    self._cleaned = True
                return write(_cancelling(cancelled, report.add))

        result = self._retry(lambda: self._or_renewed(once), cancelled=cancelled)
        self.metrics.add("bytes.up", len(data))
        if journal is not None:
            # We note nothing there; others may have.
            journal.clear()
        return result

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
        """Copies an object without reading it here, if the file system can; see :func:`copy_to`."""
        origin, path, cancelled = self._path(source), self._path(target), threading.Event()

        def once() -> None:
            self.metrics.add("requests.copy")
            with self._turn:
                self._copy(target, origin, path, size, _cancelling(cancelled, check))

        self._retry(once, cancelled=cancelled)
        self.metrics.add("bytes.copied", size)
        if progress is not None:
            progress(size)
        if journal is not None:
            journal.clear()

    def abandon(self, key: str, journal: UploadJournal) -> None:  # noqa: ARG002 - nothing is kept
        journal.clear()

    def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(StoreNotFoundError):
            self._ask("delete", key, lambda: self._delete(path))

    def close(self) -> None:  # noqa: B027 - there is nothing to free
        pass

    # ----------------------------------------------------------------------------------------- hooks
    @abstractmethod
    def _files(self, folder: str) -> Iterable[tuple[str, int, float]]:
        """Yields path, size and time of each file at any depth below a folder, which need not exist."""

    @abstractmethod
    def _get(self, path: str) -> bytes: ...

    @abstractmethod
    def _size(self, path: str) -> int: ...

    @abstractmethod
    def _write(self, key: str, path: str, data: UploadContent, report: Callable[[int], None]) -> Any:
        """See :meth:`Store.upload`; guards its own calls, as errors of ``data`` and ``report`` are the caller's."""

    @abstractmethod
    def _copy(self, key: str, source: str, path: str, size: int, check: Callable[[], None]) -> None:
        """See :meth:`copy`; guards its own calls, as errors of ``check`` are the caller's."""

    @abstractmethod
    def _delete(self, path: str) -> None: ...

    @abstractmethod
    def _drop_abandoned(self) -> None:
        """Removes the remains of dead writers from the scratch folder."""

    # --------------------------------------------------------------------------------------- helpers
    def _path(self, key: str) -> str:
        if f"{validate_key(key)}/".startswith(_SCRATCH + "/"):
            raise ConfigError(f"key {key!r} lies in the store's own folder {_SCRATCH!r}")
        return f"{self._root}/{key}"

    def _ask(self, request: str, key: str, call: Callable[[], _T]) -> _T:
        """Returns the result of ``call``; counted, and repeated if needed."""

        def once() -> _T:
            self.metrics.add(f"requests.{request}")
            with self._guarded(request, key):
                return call()

        return self._retry(lambda: self._or_renewed(once))

    def _or_renewed(self, once: Callable[[], _T]) -> _T:
        """Returns the result of ``once``; if its credentials are refused, calls it again with renewed ones."""
        refused = self._fs
        try:
            return once()
        except StoreError as error:
            if not error.is_denied or not self._renewed(refused):
                raise
        return once()

    def _renewed(self, refused: Any) -> bool:  # noqa: ARG002
        """Returns True if ``_fs`` is no longer the object that was refused."""
        return False

    @contextlib.contextmanager
    def _guarded(self, operation: str, key: str) -> Iterator[None]:
        """Calls of the file system, one at a time if need be, with its errors made ours."""
        try:
            with self._turn:
                yield
        except TieredCheckpointError:
            raise
        except self._errors as error:
            raise self._translated(error, operation, key) from error

    def _translated(self, error: Exception, operation: str, key: str) -> StoreError:
        reason, hint = reason_of(error), None
        number = error.errno if isinstance(error, OSError) else None
        if operation == "put" and isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
            reason, hint = None, "a file and a folder cannot have the same name"
        elif operation == "put" and reason == "missing":
            reason, hint = "config", "the bucket or folder to write to does not exist; check dirpath"
        elif reason == "access":
            hint = self._access_hint
        elif reason == "unavailable":
            hint = self._network_hint
        elif reason == "full":
            hint = "no room: free some, or save elsewhere; what was saved before is intact"
        # The text of other libraries may hold credentials (URLs do), so only the error's kind is passed on.
        status = _status(error)
        detail = f"{type(error).__name__}, HTTP {status}" if status is not None else type(error).__name__
        text = os.strerror(number) if number else detail
        return store_error(reason, f"{operation} failed: {text}", operation=operation, key=key, hint=hint)


def _cancelling(cancelled: threading.Event, call: Callable[_P, None]) -> Callable[_P, None]:
    """Returns ``call``, of which any error is the caller's own, and so ends all attempts."""

    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except BaseException:
            cancelled.set()
            raise

    return run


def _status(error: Exception) -> int | None:
    """Returns the HTTP status of an error, as in errors of gcsfs, adlfs, aiohttp and requests."""
    for holder in (error, getattr(error, "response", None)):
        for field in ("status_code", "status", "code"):
            value = getattr(holder, field, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


def reason_of(error: Exception) -> Reason | None:
    """Returns the reason of a file system's error, by type, HTTP status and errno, never by text.

    Libraries wrap errors: if an error has no known reason itself, its cause is judged.
    """
    each: BaseException | None = error
    judged: set[int] = set()
    while isinstance(each, Exception) and id(each) not in judged:
        reason, is_known = _own_reason(each)
        if is_known:
            # A cause may be about another missing file: it does not prove that the requested one is missing.
            return None if each is not error and reason == "missing" else reason
        judged.add(id(each))
        # Not the error that was being handled meanwhile, which may be the caller's.
        each = each.__cause__
    return None


def _own_reason(error: Exception) -> tuple[Reason | None, bool]:
    """Returns the reason of an error without its cause, and whether the reason is known."""
    status = _status(error)
    number = error.errno if isinstance(error, OSError) else None
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if isinstance(error, _MISSING) or status == 404:
        return "missing", True
    if isinstance(error, PermissionError) or number == errno.EROFS or status in (401, 403) or names & _NO_CREDENTIALS:
        return "access", True
    if isinstance(error, TimeoutError | ConnectionError) or names & _CONNECTION_LOST:
        return "unavailable", True
    if status in _RETRYABLE_STATUS or number in _RETRYABLE_ERRNO:
        return "unavailable", True
    if number in _FULL:
        return "full", True
    if number is None and type(error) is OSError and _is_raised_by(error, "gcsfs.retry"):
        # All that gcsfs says if a request is forbidden.
        return "access", True
    return None, status is not None or number is not None


def _is_raised_by(error: Exception, module: str) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == module
