"""DirectoryStore: a durable tier in a directory of a local or network file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreChangedError, StoreFullError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import UploadContent, UploadJournal, changed, too_short
from tiered_checkpoint_io.stores.duplicates import duplicate
from tiered_checkpoint_io.stores.files import FileStore, kind_of

_T = TypeVar("_T")
_SLICE = 8 << 20
#: How often folders are made again that others, who had emptied them, removed under our hands.
_ATTEMPTS = 100
#: In the scratch folder, where what no process has locked is removed.
_LOCK = "conditional-write"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


class DirectoryStore(FileStore):
    """Objects as files: written under another name, synced, renamed, and the folder synced."""

    _errors = OSError
    _access_hint = "check the owner and mode of dirpath, and whether it is mounted read-only"
    _network_hint = "check the file system's server"

    def __init__(self, root: str, *, clock: Clock = SYSTEM) -> None:
        """Makes nothing: the directory appears with its first object."""
        path = os.path.abspath(root)
        super().__init__(path, path.rstrip("/"), clock)

    def _files(self, folder: str) -> Iterator[tuple[str, int, float]]:
        for base, _, names in os.walk(folder or "/", onerror=_refuse_walk):
            for name in names:
                path = os.path.join(base, name)
                # Removed while we look: the list is of what is there.
                with contextlib.suppress(FileNotFoundError):
                    facts = os.stat(path)
                    yield path, facts.st_size, facts.st_mtime

    def children(self, prefix: str) -> list[str]:
        """The names right below ``prefix``; see :func:`fallbacks.children_of`."""
        folder = f"{self._root}/{prefix}"

        def names() -> list[str]:
            try:
                with os.scandir(folder) as entries:
                    return [each.name + "/" * each.is_dir() for each in entries]
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._ask("list", prefix, names)

    def _get(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def _size(self, path: str) -> int:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return facts.st_size

    def _read(self, key: str, path: str, offset: int, buffer: memoryview) -> None:
        done = 0
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while done < len(buffer):
                with buffer[done:] as rest:
                    count = file.readinto(rest)
                if not count:
                    raise too_short(key, os.fstat(file.fileno()).st_size, offset + len(buffer))
                done += count

    def read_pieces(self, key: str, offset: int, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        """Fills several buffers; see :func:`stores.base.read_pieces`."""
        path = self._path(key)

        def once() -> None:
            at = offset
            for index, piece in enumerate(pieces):
                self._read(key, path, at, piece)
                at += len(piece)
                filled(index)

        self._ask("get", key, once)
        self.metrics.add("bytes.down", sum(len(piece) for piece in pieces))

    # ------------------------------------------------------------------------- conditional writes
    def tag(self, key: str) -> str | None:
        path = self._path(key)
        return self._ask("head", key, lambda: _tag_at(path))

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        path = self._path(key)
        data, tag = self._ask("get", key, lambda: _read_tagged(path))
        self.metrics.add("bytes.down", len(data))
        return data, tag

    def put_if(self, key: str, data: bytes, expected: str | None) -> str:
        try:
            return self._upload_if(key, memoryview(data), expected)
        except StoreChangedError:
            # A file system over a network may have lost just the answer.
            with contextlib.suppress(StoreNotFoundError):
                found, tag = self.get_tagged(key)
                if found == data:
                    return tag
            raise

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
        if look is not None:
            # At the beginning already: a file's tag is another at each write, and tells all that comes then.
            look()
        self._upload_if(key, data, expected, journal, progress)

    def _upload_if(
        self,
        key: str,
        data: UploadContent,
        expected: str | None,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> str:
        path, tag = self._path(key), ""

        def write(report: Callable[[int], None]) -> None:
            nonlocal tag
            tag = self._replace(key, path, data, report, lambda: self._unchanged("put", key, path, expected))

        self._upload(key, data, write, journal, progress)
        return tag

    def delete_if(self, key: str, expected: str) -> None:
        path = self._path(key)

        def delete() -> None:
            if _tag_at(path) is not None:
                with self._unchanged("delete", key, path, expected):
                    self._delete(path)

        with contextlib.suppress(StoreNotFoundError):
            self._ask("delete", key, delete)

    @contextlib.contextmanager
    def _unchanged(self, operation: str, key: str, path: str, expected: str | None) -> Iterator[None]:
        """A block that no other conditional write comes between; entered where the file is as expected."""
        with self._alone(makes_room=operation == "delete"):
            if _tag_at(path) != expected:
                raise changed(operation, key)
            yield

    @contextlib.contextmanager
    def _alone(self, *, makes_room: bool) -> Iterator[None]:
        """A block that holds the lock of conditional writes; what ``makes_room`` needs none where there is no room."""
        lock = os.path.join(self._scratch, _LOCK)
        while True:
            try:
                descriptor = _within(
                    self._scratch, lambda: os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                )
            except OSError as error:
                if not makes_room or kind_of(error) is not StoreFullError:
                    raise
                break
            try:
                # Held for a rename. Where there are no locks, another writer may come between.
                _lock(descriptor, fcntl.LOCK_EX)
                if not os.fstat(descriptor).st_nlink:
                    continue
                try:
                    yield
                    return
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(lock)
            finally:
                os.close(descriptor)
        yield

    def _write(self, key: str, path: str, data: UploadContent, report: Callable[[int], None]) -> None:
        self._replace(key, path, data, report, contextlib.nullcontext)

    def _replace(
        self,
        key: str,
        path: str,
        data: UploadContent,
        report: Callable[[int], None],
        unchanged: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> str:
        """Writes a file, and puts it into its place within ``unchanged()``; its tag."""
        folder = os.path.dirname(path)
        with self._temporary(key) as (descriptor, temporary):
            for start in range(0, len(data), _SLICE):
                with data[start : start + _SLICE] as piece, self._guarded("put", key):
                    count = len(piece)
                    _write_all(descriptor, piece)
                report(count)
            with self._guarded("put", key):
                os.fsync(descriptor)
                with unchanged():
                    _within(folder, lambda: os.rename(temporary, path))
                tag = _tag_of(os.fstat(descriptor))
        with self._guarded("put", key):
            _sync_folder(folder)
        return tag

    def _copy(self, key: str, source: str, path: str, size: int, check: Callable[[], None]) -> None:
        with self._guarded("copy", key):
            self._size(source)
            origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        # From here on the source is there, whatever else is missing.
        try:
            with self._temporary(key) as (descriptor, temporary):
                with self._guarded("put", key):
                    # A hard link is the same file: shared with a cleaner's lock, it is not taken for abandoned.
                    _lock(origin, fcntl.LOCK_SH)
                    duplicate(origin, source, descriptor, temporary)
                    found = os.stat(temporary).st_size
                self._check_size(key, found, size)
                check()
                with self._guarded("put", key):
                    _within(os.path.dirname(path), lambda: os.rename(temporary, path))
                    # Two names of one file are not renamed onto each other: the first one stays.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(temporary)
            with self._guarded("put", key):
                _sync_folder(os.path.dirname(path))
        finally:
            os.close(origin)

    def _delete(self, path: str) -> None:
        folder = os.path.dirname(path)
        os.unlink(path)
        _sync_folder(folder)
        # Folders exist for their files alone here; the last one gone, they go too.
        with contextlib.suppress(OSError):
            while folder.startswith(self._root + "/"):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[int, str]]:
        """A new file to write to, locked while we do; gone at the end unless it was renamed."""
        while True:
            path = os.path.join(self._scratch, self._clock.token(12))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with self._guarded("put", key):
                descriptor = _within(self._scratch, lambda: os.open(path, flags, 0o666))  # noqa: B023 - called here
                # A cleaner may hold it for a moment, no longer.
                _lock(descriptor, fcntl.LOCK_EX)
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
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._scratch):
                # What another user left is theirs to remove, and what is locked has a writer.
                with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
                    self._drop_if_abandoned(os.path.join(self._scratch, name))

    def _drop_if_abandoned(self, path: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            locked = _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Where there are no locks, an abandoned file is known by its age.
            if locked or self._clock.wall() - os.fstat(descriptor).st_mtime > self._clock.timing.abandoned_s:
                # Under the lock: a writer that waits for it will see that its file is gone.
                os.unlink(path)
        finally:
            os.close(descriptor)


def _tag_of(facts: os.stat_result) -> str:
    """Each write makes a file of its own, so these tell it from the one before."""
    return f"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"


def _tag_at(path: str) -> str | None:
    try:
        return _tag_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_tagged(path: str) -> tuple[bytes, str]:
    with open(path, "rb") as file:
        return file.read(), _tag_of(os.fstat(file.fileno()))


def _within(folder: str, action: Callable[[], _T]) -> _T:
    """Does what needs ``folder``, making it as often as others remove it, empty as it is."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return action()
        _make_folder(folder)
    return action()


def _make_folder(folder: str) -> None:
    """Makes a folder and those above it, durably."""
    above = os.path.dirname(folder)
    if not os.path.isdir(above):
        _make_folder(above)
    # Made by others, or the one above removed under our hands: the caller tries again.
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.mkdir(folder)
        _sync_folder(above)


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


def _lock(descriptor: int, how: int) -> bool:
    """Locks a file; False where the file system has no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _refuse_walk(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
