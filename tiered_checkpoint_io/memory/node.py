"""Facts about the node for the memory tier: its memory limits, its file systems, and the id of its boot."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
    for folder, names in _cgroups(proc, cgroup):
        limits += names.limits(folder)
    return min(limits)


def memory_left(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the unused bytes of memory that this process may take, less a margin for others; maybe below 0.

    Memory that others take meanwhile is not in it: a process that goes beyond it is ended by the kernel.
    """
    left = [memory_limit(proc, cgroup)]
    margin = min(_MAX_MARGIN, left[0] // _MARGIN_SHARE)
    with contextlib.suppress(OSError, ValueError, KeyError):
        left.append(_fields(proc / "meminfo")["MemAvailable"] * 1024)
    for folder, names in _cgroups(proc, cgroup):
        with contextlib.suppress(OSError, ValueError):
            used = int((folder / names.usage).read_text())
            # Pages of files on disks go when room is needed; those of tmpfs are not among them.
            cached = _fields(folder / "memory.stat")
            room = sum(cached.get(name, 0) for name in names.cached) - used
            left += [limit + room for limit in names.limits(folder)]
    return min(left) - margin


def unbounded() -> int:
    """Returns no bound: the value of :func:`memory_left` for checkpoints on a disk."""
    return sys.maxsize


class _Names(NamedTuple):
    """Names of the files of a memory cgroup."""

    limit: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]

    def limits(self, folder: Path) -> list[int]:
        """Returns the limits that are set, in bytes."""
        found = []
        for name in self.limit:
            with contextlib.suppress(OSError, ValueError):
                found.append(int((folder / name).read_text()))
        return found


#: Beyond memory.high the kernel ends no process, but slows each allocation down, for good if pages are of tmpfs.
_V2 = _Names(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))
_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def _cgroups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Names]]:
    """Yields the folders whose limits may bind this process, and the names of their files."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text("utf-8", "replace").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = cgroup, _V2
        elif "memory" in controllers.split(","):
            base, names = cgroup / "memory", _V1
        else:
            continue
        # The limit of any ancestor binds. In a container the path may be one that only the host
        # sees; the container's own limit is then at the root.
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield base / folder, names


def _fields(path: Path) -> dict[str, int]:
    """Reads lines such as ``MemAvailable: 12 kB``."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def mounts() -> list[tuple[str, str]]:
    """Returns the mount point and kind of each file system; none without /proc.

    Raises:
        OSError: The mount table can't be read now, as by a process that is out of descriptors.
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
