"""File locks that a process holds for its life, and that a forked child never keeps alive."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.memory.private import inode_at, inode_of
from tiered_checkpoint_io.memory.space import needs_space

#: Paths and identities of the locked files, by descriptor.
_held: dict[int, tuple[Path, tuple[int, int]]] = {}
_guard = threading.Lock()


def try_lock(path: Path, *, shared: bool = False, patience_s: float = 0.0, clock: Clock = SYSTEM) -> int | None:
    """Takes a lock on a file, which is made if missing; several processes may hold a shared one.

    Returns:
        A descriptor for :func:`release`; None if another still holds the lock after ``patience_s`` seconds.

    Raises:
        MemoryFullError: The file is missing, and there is no space for it.
    """
    with needs_space("no space for a lock file", operation="lock", key=str(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        has_it = flock(descriptor, patience_s, clock.timing.lock_poll_s, clock, shared=shared)
    except BaseException:
        os.close(descriptor)
        raise
    if not has_it:
        os.close(descriptor)
        return None
    with _guard:
        _held[descriptor] = path, inode_of(os.fstat(descriptor))
    return descriptor


def flock(descriptor: int, patience_s: float, poll_s: float, clock: Clock, *, shared: bool = False) -> bool:
    """Locks an open file, trying for ``patience_s`` seconds; returns whether it has the lock."""
    deadline = clock.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.monotonic() >= deadline:
                return False
            clock.sleep(poll_s)
        else:
            return True


def is_lost(descriptor: int) -> bool:
    """Returns whether the locked file was removed or moved: others then lock a new one."""
    held = _held.get(descriptor)
    return held is not None and inode_at(held[0]) != held[1]


def share(descriptor: int) -> None:
    """Makes a lock of :func:`try_lock` shared. It is free for a moment; another process may take the lock then."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def release(descriptor: int) -> None:
    """Releases a lock; in a forked child, whose copy is closed already, does nothing."""
    with _guard:
        is_held = _held.pop(descriptor, None) is not None
    if is_held:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock exclusively right now."""
    descriptor = try_lock(path, shared=True)
    if descriptor is None:
        return True
    release(descriptor)
    return False


def _drop_in_child() -> None:
    # A lock lives as long as any copy of its descriptor: a DataLoader's worker that outlives its
    # trainer would pass for one. Closing the copy leaves the parent's lock as it is.
    global _guard
    _guard = threading.Lock()
    while _held:
        os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_drop_in_child)
