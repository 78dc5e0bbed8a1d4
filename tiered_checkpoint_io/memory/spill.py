"""The spill: a folder on the node's disk for parts that do not fit into its memory, and the node memory that owns it.

A path does not identify a memory: containers with a memory each see it under the same path, and may share a disk. So a
file in the spill names the node memory that owns it, by device and inode at this boot, and each process that uses the
spill holds a shared lock of that file for the rest of its life. If another memory's process lives, the next spill is
used: ``…-2``. A spill whose owner has no live process is taken over, as after a reboot, with all that it holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import MemoryTierError
from tiered_checkpoint_io.memory.node import (
    inode_at,
    inode_of,
    is_local_disk,
    is_scarcity,
    is_tmpfs,
    make_folders,
    memory_left,
    memory_of,
    private_folder,
)
from tiered_checkpoint_io.memory.parts import clear_dead
from tiered_checkpoint_io.model.documents import hash_bytes

if TYPE_CHECKING:
    from tiered_checkpoint_io.memory.tier import MemoryTier

AUTO = "auto"
#: The file of a spill that names its owner.
OWNER_FILE = "owner"


class _Claim(NamedTuple):
    folder: Path
    descriptor: int
    owner: str

    @property
    def is_lost(self) -> bool:
        """True if the claim's file was removed, so that other processes do not see the lock."""
        return inode_at(self.folder / OWNER_FILE) != inode_of(os.fstat(self.descriptor))

    def write(self, owner: str) -> None:
        """Writes the owner."""
        os.ftruncate(self.descriptor, os.pwrite(self.descriptor, owner.encode(), 0))


#: Claims of this process, by the path that was asked for.
_claims: dict[Path, _Claim] = {}
_guard = threading.Lock()
#: Number of looks at another's spill: its owner may be dead, and a process that just looks may lock it.
_TRIES = 5


def claim(base: Path, memory: Path, clock: Clock, *, make: bool) -> Path | None:
    """Returns the folder of a node memory's spill, which it owns until the last process that claimed it ends.

    Args:
        base: The spill's path; ``base-2`` and so on are used if a live process uses it for another memory.
        memory: The root of the node memory.
        clock: For ids, and waits.
        make: True to make one if this memory has none; if False, None is returned then.

    Raises:
        MemoryTierError: A folder is open to others, or its lock can't be had.
        OSError: The folder can't be used for another reason.
    """
    with _guard:
        mine = _claims.get(base)
        owner = _id_of(memory) or (clock.token(16) if mine is None else mine.owner)
        if mine is not None:
            if not mine.is_lost:
                with contextlib.suppress(OSError):
                    # Cleaners of temporary folders remove files of 10 days ago.
                    os.utime(mine.descriptor)
                if owner != mine.owner:
                    # The memory's folder was made again. All its processes still use this spill.
                    mine.write(owner)
                    _claims[base] = mine._replace(owner=owner)
                return mine.folder
            os.close(_claims.pop(base).descriptor)
        others = set[Path]()
        while (folder := _next(base, owner, others, make=make)) is not None:
            taken = _take(folder, owner, clock, tries=_TRIES if make else 1)
            if taken is not None:
                _claims[base] = taken
                return folder
            others.add(folder)
        return None


def _next(base: Path, owner: str, others: set[Path], *, make: bool) -> Path | None:
    """Returns the next folder to try: the owner's own, then other existing ones, then, with ``make``, a new one."""
    folders = sorted(siblings(base), key=lambda each: _owner_of(each) != owner)
    more = (base.with_name(f"{base.name}-{each}") for each in itertools.count(2))
    new = itertools.chain([base], more) if make else iter(())
    return next((each for each in itertools.chain(folders, new) if each not in others), None)


def siblings(base: Path) -> list[Path]:
    """Returns the spills that are there under a path, of any owner."""
    try:
        names = os.listdir(base.parent)
    except OSError:
        return []
    found = re.compile(re.escape(base.name) + r"(?:-(\d{1,3}))?")
    numbered = {int(match[1] or 1): base.with_name(name) for name in names if (match := found.fullmatch(name))}
    return [numbered[number] for number in sorted(numbered)]


def _id_of(memory: Path) -> str:
    """Returns the id of a node memory; empty for one that is gone, as after a reboot: its spill may be there."""
    try:
        return hash_bytes(memory_of(memory).encode())
    except FileNotFoundError:
        return ""


def _owner_of(folder: Path) -> str:
    try:
        return (folder / OWNER_FILE).read_text("utf-8", "replace")
    except OSError:
        return ""


def _take(folder: Path, owner: str, clock: Clock, *, tries: int) -> _Claim | None:
    """Claims one spill; None if another live memory has it at each try."""
    deadline = clock.monotonic() + clock.timing.space_wait_s
    while True:
        private_folder(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        taken = _Claim(folder, os.open(folder / OWNER_FILE, flags, 0o600), owner)
        try:
            if _lock(taken.descriptor, fcntl.LOCK_EX):
                # No live process has it. The owner is written in place: a full disk has no new block for it.
                taken.write(owner)
            # Not in one step: another process may come between, and its owner is read then.
            while not _lock(taken.descriptor, fcntl.LOCK_SH):
                _wait(clock, deadline, folder)
            is_lost = taken.is_lost
            if not is_lost and os.pread(taken.descriptor, 1024, 0) == owner.encode():
                return taken
        except BaseException:
            os.close(taken.descriptor)
            raise
        os.close(taken.descriptor)
        tries -= not is_lost
        if not tries:
            return None
        # The spill was being removed, or is another's as yet.
        _wait(clock, deadline, folder)


def _wait(clock: Clock, deadline: float, folder: Path) -> None:
    if clock.monotonic() > deadline:
        text = "another process has been changing the owner of this spill for too long"
        raise MemoryTierError(text, operation="open", tier="memory", key=str(folder), hint="name another spill_dir")
    clock.sleep(clock.timing.space_poll_s)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _drop_in_child() -> None:
    # A worker that outlives its trainer would keep the spill for it.
    global _guard
    _guard = threading.Lock()
    while _claims:
        os.close(_claims.popitem()[1].descriptor)


os.register_at_fork(after_in_child=_drop_in_child)


def spill_dir_of(configured: str | None) -> str | None:
    """Returns the folder that a configured ``spill_dir`` means; None for no spill."""
    if configured != AUTO:
        return configured
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        # A pod can't see its limit of disk space, and a pod that uses more is evicted.
        return None
    try:
        folders = (tempfile.gettempdir(), "/var/tmp")  # noqa: S108 - a private folder is made there
        return next((each for each in folders if os.path.isdir(each) and is_local_disk(each)), None)
    except OSError:
        return None


def spill_root(spill_dir: str, root: Path) -> Path:
    """Returns a memory tier's spill folder, see :func:`claim`: jobs may use one namespace in several memory folders."""
    mark = hash_bytes(os.path.realpath(root).encode())[:8]
    return Path(spill_dir) / f"tiered-{os.getuid()}" / f"{root.name}-{mark}"


def disk_left(root: Path, used: int, *, is_shared: bool, is_bound: bool = True) -> int:
    """Returns the number of bytes that a spill may still take.

    Args:
        root: The spill.
        used: Bytes that the spill takes already.
        is_shared: True if the user did not name the disk for it, so that half of the disk's free space stays free.
        is_bound: True if the memory that this process may take bounds a spill on a tmpfs; not for one that only looks.
    """
    facts = os.statvfs(root)
    free = facts.f_bavail * facts.f_frsize
    if is_shared:
        free = (free - used) // 2
    return min(free, memory_left()) if is_bound and is_tmpfs(str(root)) else free


class Spill:
    """Spill of one memory tier: none until there is one, or one is needed."""

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
            folders: Folders in the root.
            tier_at: Function that returns the tier of a spill's root.
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
        """See :meth:`MemoryTier.open_spill`; made only if ``make`` says so."""
        base = self._base
        if base is None:
            return None
        try:
            # Again each time: a cleaner of temporary folders may have taken some.
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
            # The next request asks again if other processes may free room; parts in the spill stay known.
            if not is_scarcity(error):
                self._base = self.tier = None
            return None
        return self.tier
