"""What the memory tier must know of the node: how much memory it may use, and where memory lies."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def node_budget(percentage: int, memory_dir: str) -> int:
    """Bytes that checkpoints may take on this node.

    ``percentage`` of the node's memory (of the cgroup's limit, where that is lower), but never more
    than the file system of ``memory_dir`` has in all.
    """
    file_system = os.statvfs(memory_dir)
    return min(memory_limit() * percentage // 100, file_system.f_blocks * file_system.f_frsize)


def memory_limit(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, or those of its container or job.

    Pages of tmpfs count against the limit of the cgroup that touches them first.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text("utf-8", "replace").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, name = cgroup, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = cgroup / "memory", "memory.limit_in_bytes"
        else:
            continue
        # The limit of any ancestor binds. In a container the path may be one that only the host
        # sees; the container's own limit is then at the root.
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((base / folder / name).read_text()))
    return min(limits)


def is_tmpfs(path: str) -> bool:
    """Whether ``path`` lies on tmpfs or ramfs, as the mount table says."""
    best, kind = "", ""
    real = os.path.realpath(path)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, name, *_ = line.split(" ")
            mount = mount.replace("\\040", " ")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, name
    return kind in ("tmpfs", "ramfs")
