"""The spill: where on a node's disk the parts go that do not fit into its memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tiered_checkpoint_io.memory.node import is_local_disk, is_tmpfs, memory_left
from tiered_checkpoint_io.model.hashing import hash_bytes

AUTO = "auto"


def spill_dir_of(configured: str | None) -> str | None:
    """The folder that a configured ``spill_dir`` means; None for no spill."""
    if configured != AUTO:
        return configured
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        # How much disk a pod may use is hidden from it, and one that uses more is evicted.
        return None
    try:
        folders = (tempfile.gettempdir(), "/var/tmp")  # noqa: S108 - a private folder is made there
        return next((each for each in folders if os.path.isdir(each) and is_local_disk(each)), None)
    except OSError:
        return None


def spill_root(spill_dir: str, root: Path) -> Path:
    """The spill of a memory tier: one of its own, also where jobs use one namespace in several memory folders."""
    mark = hash_bytes(os.path.realpath(root).encode())[:8]
    return Path(spill_dir) / f"tiered-{os.getuid()}" / f"{root.name}-{mark}"


def disk_left(root: Path, used: int, *, is_shared: bool) -> int:
    """Bytes that a spill may still take.

    Args:
        root: The spill.
        used: What it takes already.
        is_shared: Whether the user did not name the disk for it, so that half of what is free without it stays free.
    """
    facts = os.statvfs(root)
    free = facts.f_bavail * facts.f_frsize
    if is_shared:
        free = (free - used) // 2
    return min(free, memory_left()) if is_tmpfs(str(root)) else free
