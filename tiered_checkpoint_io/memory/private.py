"""Files and folders that belong only to this user: modes, owners, and no symbolic links."""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import MemoryTierError
from tiered_checkpoint_io.memory.space import NO_SPACE, MemoryFullError, needs_space


def write_atomic(path: Path, data: bytes, clock: Clock = SYSTEM) -> None:
    """Writes a small private file so that a reader sees the old content or the new one, after a power loss too."""
    temporary = path.with_name(f".{path.name}.{clock.token(8)}")
    try:
        write_private(temporary, data, synced=True)
    except MemoryFullError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def write_over(path: Path, data: bytes) -> None:
    """Writes over a private file in the space that it has, or raises OSError; a reader may see a mixture."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.truncate()


def problem_with(folder: Path) -> str:
    """Makes a folder of this user only; returns the problem with the one that is there, or ""."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    facts = os.lstat(folder)
    if stat.S_ISLNK(facts.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(facts.st_mode):
        return "is not a folder"
    if facts.st_uid != os.getuid():
        return f"belongs to user {facts.st_uid}, not to {os.getuid()}"
    if stat.S_IMODE(facts.st_mode) & 0o077:
        return f"is open to others (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""


def private_folder(folder: Path) -> bool:
    """Makes a folder of the memory tier; returns whether it was open to its group, and was closed to it.

    Kubernetes opens all folders of a volume to the group ``fsGroup`` when a pod starts.

    Raises:
        MemoryTierError: The existing folder is open to other users, or theirs.
    """
    problem = problem_with(folder)
    was_open = bool(problem) and _close_to_group(folder)
    if problem and not was_open:
        raise MemoryTierError(
            f"the memory tier's folder {problem}",
            operation="open",
            tier="memory",
            key=str(folder),
            hint="remove it, or name another memory_dir",
            reason="unsafe",
        )
    return was_open


def _close_to_group(folder: Path) -> bool:
    """Closes a folder of this user that is open to its group only; returns whether it is one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.getuid() or facts.st_mode & 0o007:
            return False
        os.fchmod(descriptor, 0o700)
        return True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opening(root: Path) -> Iterator[None]:
    """Raises errors of a block that makes a root of the memory tier.

    Raises:
        MemoryFullError: Memory has no space for the root.
        MemoryTierError: The root can't be used, for another reason.
    """
    try:
        yield
    except MemoryTierError:
        raise
    except OSError as error:
        kind = MemoryFullError if error.errno in NO_SPACE else MemoryTierError
        text = f"memory_dir cannot be used: {error.strerror}"
        raise kind(text, operation="open", tier="memory", key=str(root)) from error


def by_warning(text: str) -> None:
    """Warns once, if there is no log."""
    warnings.warn(text, stacklevel=2)


def make_folders(root: Path, names: Iterable[str], say: Callable[[str], None] = by_warning) -> None:
    """Makes a root, its parent folder, and the folders in it; raises as :func:`private_folder` does."""
    # The outermost first: the content of a folder is safe once the folder is closed.
    closed = [folder for folder in (root.parent, root, *(root / name for name in names)) if private_folder(folder)]
    if closed:
        text = f"{closed[0]} was open to its group, and was closed to it again"
        say(f"{text}; under Kubernetes set fsGroupChangePolicy: OnRootMismatch")


def inode_of(facts: os.stat_result) -> tuple[int, int]:
    """Returns a file's identity, with its device: each tmpfs numbers its own files from the start."""
    return facts.st_dev, facts.st_ino


def inode_at(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Returns the identity of the file that a path leads to; None for none.

    An open file may have been removed since, or its folder moved, or mounted over.
    """
    try:
        return inode_of(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def sync_folder(folder: Path) -> None:
    """Returns once a power loss can no longer undo a change of the folder's names. On tmpfs, at once."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes, *, synced: bool = False) -> None:
    with needs_space("no space for a small file", operation="write", key=str(path)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            if synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
