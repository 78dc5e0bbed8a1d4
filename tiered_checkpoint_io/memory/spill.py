"""The spill: where on a node's disk the parts go that do not fit into its memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.memory.clearing import clear_dead
from tiered_checkpoint_io.memory.node import is_local_disk, is_tmpfs, memory_left
from tiered_checkpoint_io.memory.ownership import claim, siblings
from tiered_checkpoint_io.memory.private import make_folders, private_folder
from tiered_checkpoint_io.memory.space import is_scarcity
from tiered_checkpoint_io.model.hashing import hash_bytes

if TYPE_CHECKING:
    from tiered_checkpoint_io.memory.tier import MemoryTier

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
    """Where a memory tier's spill is, see :mod:`ownership`: jobs may use one namespace in several memory folders."""
    mark = hash_bytes(os.path.realpath(root).encode())[:8]
    return Path(spill_dir) / f"tiered-{os.getuid()}" / f"{root.name}-{mark}"


def disk_left(root: Path, used: int, *, is_shared: bool, is_bound: bool = True) -> int:
    """Bytes that a spill may still take.

    Args:
        root: The spill.
        used: What it takes already.
        is_shared: Whether the user did not name the disk for it, so that half of what is free without it stays free.
        is_bound: Whether the memory that this process may take bounds a spill on a tmpfs; not for one that only looks.
    """
    facts = os.statvfs(root)
    free = facts.f_bavail * facts.f_frsize
    if is_shared:
        free = (free - used) // 2
    return min(free, memory_left()) if is_bound and is_tmpfs(str(root)) else free


class Spill:
    """What a memory tier has of the spill: nothing, until there is one or one is needed."""

    def __init__(
        self,
        memory: Path,
        folders: Iterable[str],
        tier_at: Callable[[Path], MemoryTier],
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        """Takes none yet.

        Args:
            memory: The memory tier's root.
            folders: What a root has in it.
            tier_at: Gives the tier of a spill's root.
            clock: For waits.
            say: Warns.
        """
        self.tier: MemoryTier | None = None
        self.is_shared = False
        self._memory = memory
        self._folders = tuple(folders)
        self._tier_at = tier_at
        self._clock = clock
        self._say = say
        self._base: Path | None = None

    def use(self, configured: str | None) -> None:
        """See :meth:`MemoryTier.use_spill`."""
        spill_dir = spill_dir_of(configured)
        base = spill_root(spill_dir, self._memory) if spill_dir is not None else None
        if base != self._base:
            self.tier, self._base, self.is_shared = None, base, configured == AUTO

    def find(self) -> MemoryTier | None:
        """See :attr:`MemoryTier.spill`."""
        if self.tier is None and self._base is not None and siblings(self._base):
            self.open(make=False)
        return self.tier

    def open(self, *, make: bool = True) -> MemoryTier | None:
        """See :meth:`MemoryTier.open_spill`; made only where ``make`` says so."""
        base = self._base
        if base is None:
            return None
        try:
            # Again each time: what clears temporary folders may have taken some.
            os.makedirs(base.parent.parent, exist_ok=True)
            private_folder(base.parent)
            root = claim(base, self._memory, self._clock, make=make)
            if root is None:
                return None
            make_folders(root, self._folders, self._say)
            if self.tier is None or self.tier.root != root:
                clear_dead(root, self._clock)
                self.tier = self._tier_at(root)
        except OSError as error:
            self._say(f"nothing is spilled to {base}: {getattr(error, 'message', error.strerror)}")
            # What others may give back is asked for again by the next request, and what lies there stays known.
            if not is_scarcity(error):
                self._base = self.tier = None
            return None
        return self.tier
