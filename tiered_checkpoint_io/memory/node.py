"""The node of a memory tier: its limits, file systems and processes, and files and locks that belong to one user.

A forked child leaves slots, locks and queues to its parent. A worker of a DataLoader, or a rank of ``ddp_fork``, begins
with a copy of its parent's memory and descriptors, and with none of its threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import MemoryTierError

#: Share of this process's memory that is left to others, up to a bound in bytes.
_MARGIN_SHARE = 64
_MAX_MARGIN = 1 << 30
#: Escapes of the mount table, for blanks and the like.
_ESCAPED = re.compile(rb"\\([0-3][0-7]{2})")
#: Kinds of file systems that no other node sees; "" if there is no mount table.
_LOCAL = frozenset(("", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "xfs", "zfs"))
#: The overlay of a container without root.
_LOCAL |= {"fuse-overlayfs", "fuse.fuse-overlayfs"}


def node_budget(percentage: int, memory_dir: str) -> int:
    """Returns the number of bytes that checkpoints may take on this node.

    ``percentage`` of the node's memory (of the cgroup's limit, if that is lower), but never more
    than the file system of ``memory_dir`` has in all.
    """
    file_system = os.statvfs(memory_dir)
    return min(memory_limit() * percentage // 100, file_system.f_blocks * file_system.f_frsize)


def memory_limit(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the size of the memory that this process may use: the machine's, or its container's or job's.

    Pages of tmpfs count against the limit of the cgroup that touches them first.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _cgroups(proc, cgroup):
        limits += _numbers(folder, _LIMITS)
    return min(limits)


def memory_left(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the unused bytes of memory that this process may take, less a margin for others; maybe below 0.

    Memory that others take meanwhile is not in it: a process that goes beyond it is ended by the kernel.
    """
    left = [memory_limit(proc, cgroup)]
    margin = min(_MAX_MARGIN, left[0] // _MARGIN_SHARE)
    with contextlib.suppress(OSError, ValueError, KeyError):
        left.append(_fields(proc / "meminfo")["MemAvailable"] * 1024)
    for folder in _cgroups(proc, cgroup):
        with contextlib.suppress(OSError, ValueError):
            # Pages of files on disks go when room is needed; those of tmpfs are not among them.
            facts = _fields(folder / "memory.stat")
            cached = sum(facts.get(f"total_{name}", facts.get(name, 0)) for name in ("active_file", "inactive_file"))
            limits, used = _numbers(folder, _LIMITS), _numbers(folder, _USED)
            left += [limit + cached - each for limit in limits for each in used]
    return min(left) - margin


#: Files of a memory cgroup, of versions 2 and 1. Beyond memory.high the kernel ends no process, but slows
#: each allocation down, for good if pages are of tmpfs.
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")


def _numbers(folder: Path, names: Iterable[str]) -> list[int]:
    """Returns the numbers in files, of those that are there and hold one."""
    found = []
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            found.append(int((folder / name).read_text()))
    return found


def _cgroups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Yields the folders whose limits may bind this process."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text("utf-8", "replace").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = cgroup / "memory" if controllers else cgroup
        # The limit of any ancestor binds. In a container the path may be one that only the host
        # sees; the container's own limit is then at the root.
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield base / folder


def _fields(path: Path) -> dict[str, int]:
    """Reads lines such as ``MemAvailable: 12 kB``."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def mounts() -> list[tuple[str, str]]:
    """Returns the mount point and kind of each file system; none without /proc.

    Raises OSError if the mount table can't be read now, as by a process that is out of descriptors.
    """
    try:
        table = Path("/proc/self/mounts").read_bytes()
    except FileNotFoundError:
        return []
    # A mount's path may hold any bytes, also bytes that are not UTF-8.
    rows = (line.split(b" ") for line in table.split(b"\n") if line)
    return [(os.fsdecode(_ESCAPED.sub(lambda m: bytes([int(m[1], 8)]), row[1])), os.fsdecode(row[2])) for row in rows]


def is_tmpfs(path: str) -> bool:
    """Returns True if ``path`` is on tmpfs or ramfs; raises as :func:`mounts` does."""
    return _kind(path) in ("tmpfs", "ramfs")


def is_local_disk(path: str) -> bool:
    """Returns True if ``path`` is on a disk known to belong only to this node; raises as :func:`mounts` does."""
    return _kind(path) in _LOCAL


def _kind(path: str) -> str:
    """Returns the kind of the file system that holds ``path``, as the mount table says."""
    best, kind = "", ""
    real = os.path.realpath(path)
    for mount, name in mounts():
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def memory_of(root: Path) -> str:
    """Names a memory tier: equal if processes see the same files, also in containers of their own."""
    facts = os.stat(root)
    return f"{this_boot()}/{facts.st_dev}/{facts.st_ino}"


def this_boot() -> str:
    """Returns an id of this machine's boot, or its host name if the id is unknown."""
    return boot_id() or socket.gethostname()


def boot_id() -> str:
    """Returns the id of this machine's boot; "" if it can't be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Identity(NamedTuple):
    """A process, so that another process of its machine can tell if it lives.

    Attributes:
        machine: Start of its machine, and namespace of its pid; empty if one is unknown.
        pid: Its number.
        born: Its start, in the machine's clock ticks; -1 if unknown.
    """

    machine: str
    pid: int
    born: int

    @classmethod
    def of_this_process(cls) -> Identity:
        """Returns that of this process."""
        boot, pid_ns, born = boot_id(), _pid_ns(), None
        try:
            born = _born(os.getpid())
        except OSError:
            # Out of descriptors: others judge by its answers.
            boot = ""
        return cls(f"{boot} {pid_ns}" if boot and pid_ns else "", os.getpid(), -1 if born is None else born)

    def is_alive(self, here: str) -> bool | None:
        """Returns True if the process lives on the machine ``here``; None if that can't be seen from there."""
        if not here or self.machine != here:
            return None
        try:
            return _born(self.pid) == self.born
        except OSError:
            # A process that can't be read is hidden, or we are out of descriptors.
            return None


def _born(pid: int) -> int | None:
    """Returns the clock ticks since boot at which a process began; None for none, or a dead one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in brackets, may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        if _exists(pid):
            raise
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _pid_ns() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_SCARCE = (errno.EMFILE, errno.ENFILE, *NO_SPACE)
FULL_HINT = "memory_dir is full: give it more space (docker: --shm-size), or lower memory_keep_last"


class MemoryFullError(MemoryTierError):
    """No room in the memory tier: its budget is used up, or its file system is full."""

    _reason = "full"


@contextlib.contextmanager
def needs_space(what: str, *, operation: str, key: str, hint: str = FULL_HINT) -> Iterator[None]:
    """Raises MemoryFullError, which says ``what`` has no space, for a block that finds none in the memory tier."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise MemoryFullError(what, operation=operation, tier="memory", key=key, hint=hint) from error


class BusyError(MemoryFullError):
    """Another process takes room, and has not ended; there may be enough."""


@contextlib.contextmanager
def alone_in(folder: Path | str, doing: str, clock: Clock) -> Iterator[None]:
    """Lets one process of the node at a time into the block; raises BusyError if another is ``doing`` it for long."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    timing = clock.timing
    try:
        if not flock(lock, timing.space_wait_s, timing.space_poll_s, clock):
            text = f"another process has been {doing} for more than {timing.space_wait_s:.0f} s"
            raise BusyError(text, operation="stage", tier="memory", key=str(folder))
        try:
            yield
        finally:
            # Unlocked explicitly: a process that was forked meanwhile has the same open file.
            fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)


def is_scarcity(error: BaseException) -> bool:
    """Returns True if space or descriptors are lacking, which other processes may free."""
    return any(isinstance(each, OSError) and each.errno in _SCARCE for each in (error, error.__cause__))


def used(folder: Path) -> int:
    """Returns the number of bytes that all files below a folder take."""
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
    return total


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


def private_folder(folder: Path) -> bool:
    """Makes a folder of the memory tier; returns whether it was open to its group, and was closed to it.

    Kubernetes opens all folders of a volume to the group ``fsGroup`` when a pod starts. Raises MemoryTierError if the
    existing folder is open to other users, or theirs.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    facts, problem = os.lstat(folder), ""
    mode = stat.S_IMODE(facts.st_mode)
    if stat.S_ISLNK(facts.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISDIR(facts.st_mode):
        problem = "is not a folder"
    elif facts.st_uid != os.getuid():
        problem = f"belongs to user {facts.st_uid}, not to {os.getuid()}"
    elif mode & 0o007:
        problem = f"is open to others (mode {mode:04o})"
    elif mode & 0o070:
        # No other user can put a link in its place: it is this user's.
        folder.chmod(0o700)
        return True
    if problem:
        raise MemoryTierError(
            f"the memory tier's folder {problem}",
            operation="open",
            tier="memory",
            key=str(folder),
            hint="remove it, or name another memory_dir",
            reason="unsafe",
        )
    return False


@contextlib.contextmanager
def opening(root: Path) -> Iterator[None]:
    """Raises MemoryFullError or MemoryTierError for errors of a block that makes a root of the memory tier."""
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


#: Paths and identities of the locked files, by descriptor.
_held: dict[int, tuple[Path, tuple[int, int]]] = {}
_guard = threading.Lock()


def try_lock(path: Path, *, shared: bool = False, patience_s: float = 0.0, clock: Clock = SYSTEM) -> int | None:
    """Takes a lock on a file, which is made if missing; several processes may hold a shared one.

    Returns a descriptor for :func:`release`; None if another still holds the lock after ``patience_s`` seconds.
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


class Owner(Protocol):
    """Resources that belong to one process."""

    def forked(self) -> None:
        """Gives up the parent's resources in a forked child, on its only thread, without changing them."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def register_owner(owner: Owner) -> None:
    """Has ``owner.forked`` called in each child that is forked from now on."""
    _owners.add(owner)


def _in_child() -> None:
    # A lock lives as long as any copy of its descriptor: a DataLoader's worker that outlives its
    # trainer would pass for one. Closing the copy leaves the parent's lock as it is.
    global _guard
    _guard = threading.Lock()
    while _held:
        os.close(_held.popitem()[0])
    for owner in list(_owners):
        owner.forked()


os.register_at_fork(after_in_child=_in_child)
