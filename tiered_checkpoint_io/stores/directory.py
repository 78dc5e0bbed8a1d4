"""DirectoryStore: a durable tier in a directory of a local or network file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    InvalidNameError,
    StoreAccessError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
)
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Content, Metrics, ObjectInfo, UploadJournal, validate_key

#: Files on their way; each is locked by its writer, so that those of dead ones are known.
_SCRATCH = ids.META_PREFIX + "tmp"
_SLICE = 8 << 20
#: How often folders are made again that others, who had emptied them, removed under our hands.
_ATTEMPTS = 100

#: What network file systems say when their server is away or busy for a while.
_RETRYABLE = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


class DirectoryStore:
    """Objects as files: written under another name, synced, renamed, and the folder synced."""

    def __init__(self, root: str, *, metrics: Metrics | None = None, clock: Clock = SYSTEM) -> None:
        """Makes nothing: the directory appears with its first object.

        Args:
            root: The directory.
            metrics: Counters; new ones by default.
            clock: For the age of what dead writers left.
        """
        self._clock = clock
        self._root = os.path.abspath(root)
        self._scratch = os.path.join(self._root, _SCRATCH)
        self._metrics = metrics or Metrics()
        self._lock = threading.Lock()
        self._cleaned = False

    @property
    def url(self) -> str:
        return self._root

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._metrics.add("requests.list")
        folder = prefix.rpartition("/")[0]
        start = self._path(folder) if folder else self._root
        for base, folders, files in os.walk(start, onerror=_refuse_walk):
            if base == os.path.dirname(self._scratch):
                folders[:] = [name for name in folders if os.path.join(base, name) != self._scratch]
            inner = os.path.relpath(base, self._root)
            for name in files:
                key = name if inner == "." else f"{inner}/{name}"
                if key.startswith(prefix):
                    path = os.path.join(base, name)
                    try:
                        facts = os.stat(path)
                    except FileNotFoundError:
                        # Removed while we look: the list is of what is there.
                        continue
                    except OSError as error:
                        _translate(error, "list", key)
                    yield ObjectInfo(key, facts.st_size, facts.st_mtime)

    def folders(self, prefix: str) -> Iterator[str]:
        """The folders in ``prefix``, which ends with a slash; see Store."""
        self._metrics.add("requests.list")
        try:
            with os.scandir(self._path(prefix.rstrip("/"))) as entries:
                yield from [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return
        except OSError as error:
            _translate(error, "list", prefix)

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
        self._write(key, memoryview(data), "put", None)

    def size(self, key: str) -> int:
        self._metrics.add("requests.head")
        path = self._path(key)
        try:
            facts = os.stat(path)
            if not os.path.isfile(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as error:
            _translate(error, "size", key)
        return facts.st_size

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._metrics.add("requests.get")
        done = 0
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                file.seek(offset)
                while done < len(buffer):
                    with buffer[done:] as rest:
                        count = file.readinto(rest)
                    if not count:
                        raise CorruptCheckpointError(
                            f"object ends at byte {os.fstat(file.fileno()).st_size}; "
                            f"{offset + len(buffer)} were expected",
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
        data: Content,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._metrics.add("requests.put")
        self._write(key, data, "upload", progress)
        if journal is not None:
            # A write that ended early begins anew, so we note nothing; others may have.
            journal.clear()

    def abandon(self, key: str, journal: UploadJournal) -> None:  # noqa: ARG002 - nothing is kept
        journal.clear()

    def delete(self, key: str) -> None:
        self._metrics.add("requests.delete")
        path = self._path(key)
        try:
            os.unlink(path)
            _sync_folder(os.path.dirname(path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            _translate(error, "delete", key)
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
        if f"{validate_key(key)}/".startswith(_SCRATCH + "/"):
            raise InvalidNameError(f"key {key!r} lies in the store's own folder {_SCRATCH!r}")
        return os.path.join(self._root, key)

    def _write(self, key: str, data: Content, operation: str, progress: Callable[[int], None] | None) -> None:
        path = self._path(key)
        try:
            self._drop_abandoned()
            with self._temporary() as (descriptor, temporary):
                for start in range(0, len(data), _SLICE):
                    with data[start : start + _SLICE] as piece:
                        _write_all(descriptor, piece)
                        count = len(piece)
                    if progress is not None:
                        progress(count)
                os.fsync(descriptor)
                _insist(os.path.dirname(path), lambda: os.rename(temporary, path))
            _sync_folder(os.path.dirname(path))
        except OSError as error:
            _translate(error, operation, key)
        self._metrics.add("bytes.up", len(data))

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[tuple[int, str]]:
        """A new file to write to, locked while we do; gone at the end unless it was renamed."""
        while True:
            path = os.path.join(self._scratch, self._clock.token(12))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = _insist(self._scratch, lambda: os.open(path, flags, 0o666))  # noqa: B023 - called here
            _lock(descriptor)
            if os.fstat(descriptor).st_nlink:
                break
            # Taken for abandoned by another writer, before we had locked it.
            os.close(descriptor)
        try:
            yield descriptor, path
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def _drop_abandoned(self) -> None:
        """Removes what writers left that died; once, before the first write."""
        with self._lock:
            if self._cleaned:
                return
            self._cleaned = True
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._scratch):
                # What another user left is theirs to remove.
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    _drop_if_abandoned(os.path.join(self._scratch, name), self._clock)


def _insist(folder: str, action: Callable[[], int | None]) -> int:
    """Does what needs ``folder``, making it as often as others remove it, empty as it is."""
    for attempt in range(_ATTEMPTS):
        try:
            return action() or 0
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
            _make_folder(folder)
    raise AssertionError


def _make_folder(folder: str) -> None:
    """Makes a folder and those above it, durably."""
    missing = []
    above = folder
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    # Removed again under our hands, which makedirs takes for a file in the way where it was there
    # a moment ago. The caller tries again.
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        os.makedirs(folder, exist_ok=True)
        for made in missing:
            _sync_folder(os.path.dirname(made))


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.write(descriptor, rest)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        # A cleaner may hold it for a moment, no longer.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _drop_if_abandoned(path: str, clock: Clock) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            abandoned = True
        except BlockingIOError:
            abandoned = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # No locks here: an abandoned file is known by its age.
            abandoned = clock.wall() - os.fstat(descriptor).st_mtime > clock.timing.abandoned_s
        if abandoned:
            # Under the lock: a writer that waits for it will see that its file is gone.
            os.unlink(path)
    finally:
        os.close(descriptor)


def _refuse_walk(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        _translate(error, "list", str(error.filename))


def _translate(error: OSError, operation: str, key: str) -> NoReturn:
    if isinstance(error, StoreError):
        raise error
    kind: type[StoreError] = StoreError
    hint = None
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | FileExistsError):
        if operation in ("put", "upload"):
            hint = "a file and a folder cannot have the same name in a directory"
        else:
            kind = StoreNotFoundError
    elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
        kind, hint = StoreAccessError, "check the owner and mode of dirpath, and whether it is mounted read-only"
    elif error.errno in _FULL:
        hint = "no room: free some, or save elsewhere; what was saved before is intact"
    elif error.errno in _RETRYABLE:
        kind, hint = StoreUnavailableError, "check the file system's server"
    raise kind(
        f"{operation} failed: {os.strerror(error.errno) if error.errno else type(error).__name__}",
        operation=operation,
        tier="durable",
        key=key,
        hint=hint,
    ) from error
