"""DirectoryStore: a durable tier in a directory of a local or network file system.

Symbolic links may lead to the root only. Each folder below the root is opened by its name in the folder above, and no
link is followed there: a user who may write into dirpath could otherwise direct reads and writes to files elsewhere.
A link is no object: no list contains it, reading it is an error, and a write or a delete replaces or removes the link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import UploadContent, UploadJournal, changed, check_size, tag_of_put, too_short
from tiered_checkpoint_io.stores.files import FileStore, reason_of

_T = TypeVar("_T")
_SLICE = 8 << 20
#: Number of times that folders are made again which others, who had emptied them, removed under our hands.
_ATTEMPTS = 100
#: Name of the lock in the scratch folder, from which files that no process has locked are removed.
_LOCK = "conditional-write"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
#: A folder in which others are opened; needs no right to read it.
_FOLDER = os.O_PATH | os.O_DIRECTORY
_SENT_AT_ONCE = 1 << 30


class _LinkFoundError(OSError):
    """A symbolic link below the root is in the way; its argument is the link's name."""


class DirectoryStore(FileStore):
    """Objects as files: written under another name, synced, renamed, and the folder synced."""

    _errors = OSError
    _access_hint = "check the owner and mode of dirpath, and whether it is mounted read-only"
    _network_hint = "check the file system's server"

    def __init__(self, root: str, *, clock: Clock = SYSTEM) -> None:
        """Makes no folder: the directory appears with its first object."""
        path = os.path.abspath(root)
        super().__init__(path, path.rstrip("/"), clock)

    # ------------------------------------------------------------------------------ files and folders
    @contextlib.contextmanager
    def _folder(self, path: str, *, make: bool = False) -> Iterator[int]:
        """Opens the root or a folder below it; ``make`` makes missing folders, durably."""
        folder = self._open_root(make=make)
        try:
            for name in filter(None, path[len(self._root) :].split("/")):
                inner = _enter(folder, name, make=make)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _open_root(self, *, make: bool) -> int:
        root, flags = self._root or "/", _FOLDER | os.O_CLOEXEC
        try:
            return os.open(root, flags)
        except FileNotFoundError:
            if not make:
                raise
        _make_folder(root)
        return os.open(root, flags)

    def _in(self, path: str, action: Callable[[int, str], _T], *, make: bool = False) -> _T:
        """Returns the result of ``action`` on the folder of a path, and the name in it.

        ``make`` makes the folder, as often as others remove it, empty as it is.
        """
        above, name = os.path.split(path)
        for attempt in range(_ATTEMPTS):
            try:
                with self._folder(above, make=make) as folder:
                    return action(folder, name)
            except FileNotFoundError:
                if not make or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[io.FileIO]:
        """Opens a file to read; a pipe or a device is no object."""

        def opened(folder: int, name: str) -> io.FileIO:
            return io.FileIO(name, opener=lambda *_: _open_in(folder, name, os.O_RDONLY))

        with self._in(path, opened) as file:
            _check_file(os.fstat(file.fileno()), path)
            yield file

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._in(path, lambda folder, name: os.unlink(name, dir_fd=folder))

    def _rename(self, temporary: str, path: str) -> None:
        def rename(scratch: int, old: str) -> None:
            self._in(path, lambda folder, new: os.rename(old, new, src_dir_fd=scratch, dst_dir_fd=folder), make=True)

        self._in(temporary, rename)

    def _sync(self, path: str) -> None:
        """Syncs the folder of a path."""
        self._in(path, lambda folder, _: _sync_folder(".", folder))

    def _translated(self, error: Exception, operation: str, key: str) -> StoreError:
        if not isinstance(error, _LinkFoundError):
            return super()._translated(error, operation, key)
        text = f"{operation} failed: {str(error)!r} is a symbolic link, and no link below dirpath is followed"
        hint = "replace the link by the file or folder itself, or remove it; only dirpath itself may be a link"
        return StoreError(text, operation=operation, key=key, hint=hint)

    # ---------------------------------------------------------------------------------------- reading
    def _files(self, folder: str) -> Iterator[tuple[str, int, float]]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._folder(folder) as top:
            for base, _, names, opened in os.fwalk(".", onerror=_refuse_walk, dir_fd=top):
                for name in names:
                    # Removed while we look: the list has only files that are there.
                    with contextlib.suppress(FileNotFoundError):
                        facts = _facts(opened, name)
                        if stat.S_ISREG(facts.st_mode):
                            yield f"{folder}{base[1:]}/{name}", facts.st_size, facts.st_mtime

    def children(self, prefix: str) -> list[str]:
        """Returns the names right below ``prefix``; see :func:`children_of`."""

        def names() -> list[str]:
            try:
                with self._folder(f"{self._root}/{prefix}") as folder:
                    return [name + "/" * is_folder for name, is_folder in _entries(folder)]
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._ask("list", prefix, names)

    def _get(self, path: str) -> bytes:
        with self._opened(path) as file:
            return file.read()

    def _size(self, path: str) -> int:
        facts = self._in(path, _facts)
        _check_file(facts, path)
        return facts.st_size

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.read_pieces(key, offset, [buffer], lambda _: None)

    def read_pieces(self, key: str, offset: int, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        """Fills several buffers; see :func:`stores.base.read_pieces`."""
        path = self._path(key)

        def once() -> None:
            at = offset
            with self._opened(path) as file:
                for index, piece in enumerate(pieces):
                    _fill(file, key, at, piece)
                    at += len(piece)
                    filled(index)

        self._ask("get", key, once)
        self.metrics.add("bytes.down", sum(len(piece) for piece in pieces))

    # ------------------------------------------------------------------------- conditional writes
    def tag(self, key: str) -> str | None:
        path = self._path(key)
        return self._ask("head", key, lambda: self._tag_at(path))

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        path = self._path(key)
        data, tag = self._ask("get", key, lambda: self._read_tagged(path))
        self.metrics.add("bytes.down", len(data))
        return data, tag

    def put_if(self, key: str, data: bytes, expected: str | None) -> str:
        write = self._writing_if(key, memoryview(data), expected)
        return tag_of_put(self, key, data, lambda: self._upload(key, memoryview(data), write))

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
            # At the beginning already: each write changes a file's tag, so all later changes are seen.
            look()
        self._upload(key, data, self._writing_if(key, data, expected), journal, progress)

    def _writing_if(self, key: str, data: UploadContent, expected: str | None) -> Callable[[Any], str]:
        """Returns the ``write`` of an upload on a condition."""
        path = self._path(key)
        return lambda report: self._write(key, path, data, report, lambda: self._unchanged("put", key, path, expected))

    def delete_if(self, key: str, expected: str) -> None:
        path = self._path(key)

        def delete() -> None:
            if self._tag_at(path) is not None:
                with self._unchanged("delete", key, path, expected):
                    self._delete(path)

        with contextlib.suppress(StoreNotFoundError):
            self._ask("delete", key, delete)

    @contextlib.contextmanager
    def _unchanged(self, operation: str, key: str, path: str, expected: str | None) -> Iterator[None]:
        """Keeps other conditional writes out of the block, which is entered if the file is as expected."""
        with self._alone(makes_room=operation == "delete"):
            if self._tag_at(path) != expected:
                raise changed(operation, key)
            yield

    @contextlib.contextmanager
    def _alone(self, *, makes_room: bool) -> Iterator[None]:
        """Holds the lock of conditional writes in the block; if ``makes_room``, does without it if there is no room."""
        lock = f"{self._scratch}/{_LOCK}"
        while True:
            try:
                descriptor = self._in(
                    lock, lambda folder, name: _open_in(folder, name, os.O_WRONLY | os.O_CREAT), make=True
                )
            except OSError as error:
                if not makes_room or reason_of(error) != "full":
                    raise
                break
            try:
                # Held for a rename. If there are no locks, another writer may come between.
                _lock(descriptor, fcntl.LOCK_EX)
                if not os.fstat(descriptor).st_nlink:
                    continue
                try:
                    yield
                    return
                finally:
                    self._unlink(lock)
            finally:
                os.close(descriptor)
        yield

    def _write(
        self,
        key: str,
        path: str,
        data: UploadContent,
        report: Callable[[int], None],
        unchanged: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> str:
        """Writes a file, and puts it into its place within ``unchanged()``; its tag."""
        with self._temporary(key) as (descriptor, temporary):
            for start in range(0, len(data), _SLICE):
                with data[start : start + _SLICE] as piece, self._guarded("put", key):
                    count = len(piece)
                    _write_all(descriptor, piece)
                report(count)
            with self._guarded("put", key):
                os.fsync(descriptor)
                with unchanged():
                    self._rename(temporary, path)
                tag = _tag_of(os.fstat(descriptor))
        with self._guarded("put", key):
            self._sync(path)
        return tag

    def _copy(self, key: str, source: str, path: str, size: int, check: Callable[[], None]) -> None:
        with contextlib.ExitStack() as held:
            with self._guarded("copy", key):
                origin = held.enter_context(self._opened(source)).fileno()
            # From here on the source exists: a missing file is another one.
            with self._temporary(key) as (descriptor, temporary):
                with self._guarded("put", key):
                    found = _duplicate(origin, descriptor)
                check_size(key, found, size)
                check()
                with self._guarded("put", key):
                    self._rename(temporary, path)
            with self._guarded("put", key):
                self._sync(path)

    def _delete(self, path: str) -> None:
        def remove(folder: int, name: str) -> None:
            os.unlink(name, dir_fd=folder)
            _sync_folder(".", folder)

        self._in(path, remove)
        # Folders exist here only for their files; after the last file, they go too.
        with contextlib.suppress(OSError):
            while (path := os.path.dirname(path)).startswith(self._root + "/"):
                self._in(path, lambda folder, name: os.rmdir(name, dir_fd=folder))

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[int, str]]:
        """Makes a new file to write to, locked in the block; removed at its end unless it was renamed."""
        while True:
            path = f"{self._scratch}/{self._clock.token(12)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with self._guarded("put", key):
                descriptor = self._in(path, lambda folder, name: _open_in(folder, name, flags), make=True)  # noqa: B023
                # A cleaner may hold it for a moment, no longer.
                _lock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                break
            # Taken for abandoned by another writer, before we had locked it.
            os.close(descriptor)
        try:
            yield descriptor, path
        except BaseException:
            self._unlink(path)
            raise
        finally:
            os.close(descriptor)

    def _drop_abandoned(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._folder(self._scratch) as folder:
            for name in [name for name, is_folder in _entries(folder) if not is_folder]:
                # Another user's files are theirs to remove, and a locked file has a writer.
                with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
                    self._drop_if_abandoned(folder, name)

    def _drop_if_abandoned(self, folder: int, name: str) -> None:
        descriptor = _open_in(folder, name, os.O_WRONLY)
        try:
            locked = _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If there are no locks, an abandoned file is known by its age.
            if locked or self._clock.wall() - os.fstat(descriptor).st_mtime > self._clock.timing.abandoned_s:
                # Under the lock: a writer that waits for it will see that its file is gone.
                os.unlink(name, dir_fd=folder)
        finally:
            os.close(descriptor)

    def _tag_at(self, path: str) -> str | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return _tag_of(self._in(path, _facts))
        return None

    def _read_tagged(self, path: str) -> tuple[bytes, str]:
        with self._opened(path) as file:
            return file.read(), _tag_of(os.fstat(file.fileno()))


def _tag_of(facts: os.stat_result) -> str:
    """Returns a tag that each write changes, because each write makes a new file."""
    return f"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"


def _facts(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _check_file(facts: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise _LinkFoundError(os.path.basename(path))
    if not stat.S_ISREG(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def _open_in(folder: int, name: str, flags: int) -> int:
    """Opens a name in a folder; follows no link, and waits for no other end of a pipe."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        # The kernel says of a link that it is no folder, if a folder is wanted.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(_facts(folder, name).st_mode):
            raise _LinkFoundError(name) from error
        raise


def _enter(folder: int, name: str, *, make: bool) -> int:
    """Opens a folder in another one; ``make`` makes it, durably, if it is missing."""
    try:
        return _open_in(folder, name, _FOLDER)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
        _sync_folder(".", folder)
    return _open_in(folder, name, _FOLDER)


def _entries(folder: int) -> list[tuple[str, bool]]:
    """Returns the names of the files and folders in a folder, and whether each is a folder."""
    opened = _open_in(folder, ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(opened) as entries:
            found = [(each.name, each.is_dir(follow_symlinks=False), each) for each in entries]
            return [(name, is_dir) for name, is_dir, each in found if is_dir or each.is_file(follow_symlinks=False)]
    finally:
        os.close(opened)


def _fill(file: io.FileIO, key: str, offset: int, buffer: memoryview) -> None:
    done = 0
    file.seek(offset)
    while done < len(buffer):
        with buffer[done:] as rest:
            count = file.readinto(rest)
        if not count:
            raise too_short(key, os.fstat(file.fileno()).st_size, offset + len(buffer))
        done += count


def _duplicate(origin: int, descriptor: int) -> int:
    """Copies a file to an empty one, by a reflink or a file server if possible; returns its size.

    With a hard link, an edit of one file would change the other.
    """
    done = 0
    with contextlib.suppress(OSError):
        while sent := os.copy_file_range(origin, descriptor, _SENT_AT_ONCE):
            done += sent
    # If not all file systems can do that, the rest.
    while sent := os.sendfile(descriptor, origin, done, _SENT_AT_ONCE):
        done += sent
    os.fsync(descriptor)
    return done


def _make_folder(folder: str) -> None:
    """Makes a folder and its parents, durably."""
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


def _sync_folder(path: str, above: int | None = None) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Locks a file; False if the file system has no locks."""
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
