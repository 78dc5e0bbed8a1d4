"""The memory tier: committed parts, free slots and quarantine in one private folder of a node.

::

    <memory_dir>/tiered-<uid>/<namespace>/     0700, owner checked, symbolic links refused
      saves/<save_id>/rank-00000/{<file>, part.json}   appears whole, by one rename
                                 drained               marker: the durable tier has it, or gave up
                                 pinned                marker: mapped by a reader, never recycled
                                 replicated            marker: all parts of the save are on other nodes too
                                 awaited               marker: the save is being replicated
      replicas/<save_id>/...     the same, of other nodes' parts: never uploaded from here
      slots/  trash/  quarantine/  status/
      operations.log  drain.json  *.lock              exchange between trainers and the drain
      budget                     bytes that the trainer's checkpoints may take, for metrics
      id                         a link to nowhere that names this memory, for its spill

Parts that do not fit go to the *spill*, a root of the same kind on the node's disk, only for this memory. A part stays
in the root where it was captured; the lists of parts are of both. A path does not identify a memory: containers with a
memory each see it under the same path, and may share a disk. So a file in the spill names the node memory that owns it,
by device and inode at this boot, and each process that uses the spill holds a shared lock of that file for the rest of
its life. If another memory's process lives, the next spill is used: ``…-2``. A spill whose owner has no live process is
taken over, as after a reboot, with all that it holds.

No checkpoint's name becomes a folder here, only the last component of its path, as a file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import CheckpointNotFoundError, MemoryTierError
from tiered_checkpoint_io.memory.node import (
    FULL_HINT,
    NO_SPACE,
    MemoryFullError,
    alone_in,
    by_warning,
    is_local_disk,
    is_lost,
    is_scarcity,
    is_tmpfs,
    make_folders,
    memory_left,
    memory_of,
    opening,
    private_folder,
    release,
    share,
    sync_folder,
    try_lock,
    used,
    write_atomic,
    write_private,
)
from tiered_checkpoint_io.memory.parts import (
    AWAITED,
    DRAINED,
    NEW,
    PART_FILE,
    PINNED,
    REPLICAS,
    REPLICATED,
    SAVES,
    PartIndex,
    StoredPart,
    begin_removal,
    clear_dead,
    gone,
    mark,
    prepare_markers,
)
from tiered_checkpoint_io.memory.slots import Slot, SlotPool
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import Place, hash_bytes
from tiered_checkpoint_io.model.manifest import Part

AUTO = "auto"
#: The file of a spill that names its owner.
OWNER_FILE = "owner"


class _Claim(NamedTuple):
    folder: Path
    lock: int
    owner: str


#: Claims of this process, by the path that was asked for.
_claims: dict[Path, _Claim] = {}
_guard = threading.Lock()


def claim(base: Path, memory: Path, clock: Clock, *, make: bool) -> Path | None:
    """Returns the folder of a node memory's spill, which it owns until the last process that claimed it ends.

    If a live process uses ``base`` for another memory, ``base-2`` and so on are used. Without ``make``, returns None if
    this memory has none. Raises OSError if the folder can't be used.
    """
    with _guard, alone_in(base.parent, "taking a spill", clock):
        mine = _claims.get(base)
        owner = _id_of(memory) or (clock.token(16) if mine is None else mine.owner)
        if mine is not None:
            if not is_lost(mine.lock):
                with contextlib.suppress(OSError):
                    # Cleaners of temporary folders remove files of 10 days ago.
                    os.utime(mine.lock)
                if owner != mine.owner:
                    # The memory's folder was made again. All its processes still use this spill.
                    _write_owner(mine.lock, owner)
                    _claims[base] = mine._replace(owner=owner)
                return mine.folder
            release(_claims.pop(base).lock)
        # The owner's own, then other existing ones, then a new one.
        folders = sorted(_siblings(base), key=lambda each: _owner_of(each) != owner)
        new = (base.with_name(f"{base.name}-{each}") for each in itertools.count(2))
        for folder in itertools.chain(folders, [base], new) if make else folders:
            private_folder(folder)
            lock = try_lock(folder / OWNER_FILE, clock=clock)
            if lock is not None:
                # No live process has it.
                _write_owner(lock, owner)
                share(lock)
            elif _owner_of(folder) == owner:
                lock = try_lock(folder / OWNER_FILE, shared=True, clock=clock)
            if lock is not None and not is_lost(lock):
                _claims[base] = _Claim(folder, lock, owner)
                return folder
            if lock is not None:
                # It was being removed.
                release(lock)
        return None


def _siblings(base: Path) -> list[Path]:
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


def _write_owner(lock: int, owner: str) -> None:
    # In place: a full disk has no new block for it.
    os.ftruncate(lock, os.pwrite(lock, owner.encode(), 0))


def _drop_in_child() -> None:
    # The locks are dropped by the module of locks.
    global _guard
    _guard = threading.Lock()
    _claims.clear()


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


def disk_left(root: Path, used: int, *, is_shared: bool, is_bound: bool = True) -> int:
    """Returns the number of bytes that a spill may take beyond ``used``.

    If the disk ``is_shared``, as the user did not name it, half of its free space stays free. If it ``is_bound``, the
    memory that this process may take bounds a spill on a tmpfs; not for a process that only looks.
    """
    facts = os.statvfs(root)
    free = facts.f_bavail * facts.f_frsize
    if is_shared:
        free = (free - used) // 2
    return min(free, memory_left()) if is_bound and is_tmpfs(str(root)) else free


FOLDERS = (SAVES, REPLICAS, "slots", "trash", "quarantine", "status")
BUDGET_FILE = "budget"


def namespace_root(memory_dir: str, namespace: str) -> Path:
    """Returns the folder of a namespace's memory tier for the current user."""
    return Path(memory_dir) / f"tiered-{os.getuid()}" / ids.validate_namespace(namespace)


class MemoryTier:
    """The memory tier of one namespace on this node, as one process uses it."""

    def __init__(
        self,
        root: Path,
        *,
        budget_bytes: int | None = None,
        unmap: Callable[[memoryview, int], None] | None = None,
        folder: str = SAVES,
        left: Callable[[], int] | None = None,
        clock: Clock = SYSTEM,
        say: Callable[[str], None] = by_warning,
    ) -> None:
        """Takes a root that :meth:`open` has checked, or one to look at.

        ``budget_bytes`` is the limit of all ranks of the node together, None for no limit of ours; ``left`` returns the
        bytes that the node has left for it; ``unmap`` see :class:`SlotPool`; ``folder`` is ``saves``, or ``replicas``;
        ``say`` warns.
        """
        self.root = root
        self._parts = root / folder
        self._index = PartIndex(self._parts)
        self.budget = budget_bytes
        self._left = left
        self._clock, self._say = clock, say
        self._replicas: MemoryTier | None = None
        self.pool = SlotPool(str(root / "slots"), self.room, clock, unmap)
        #: Called with each part that is saved here, once it is committed.
        self.on_commit: Callable[[StoredPart], None] | None = None
        #: The saves of which no part may go, as they are being replicated; fewer if room is urgent (True).
        #: The tier is an argument: a cycle of references would keep its memory until the next collection.
        self.awaited: Callable[[MemoryTier, bool], Collection[str]] = lambda *_: ()
        #: Takes so many bytes from ended namespaces; or returns advice if that is not possible.
        self.find_room: Callable[[int], str] = lambda _: ""
        #: Rung when there is something new for the drain.
        self.bell: Callable[[], None] = lambda: None
        #: The job's durable tier.
        self.place: Place | None = None
        #: The spill, once it is found or made; and its first folder, if there is to be one.
        self._spill: MemoryTier | None = None
        self._spill_base: Path | None = None
        self._shares_disk = False

    @classmethod
    def open(
        cls,
        memory_dir: str,
        namespace: str,
        *,
        budget_bytes: int | None = None,
        unmap: Callable[[memoryview, int], None] | None = None,
        clock: Clock = SYSTEM,
        say: Callable[[str], None] = by_warning,
    ) -> MemoryTier:
        """Opens the tier, making its folders, and clears incomplete remains of dead processes; ``say`` warns.

        Raises MemoryTierError if a folder is open to other users, or can't be used.
        """
        root = namespace_root(memory_dir, namespace)
        with opening(root):
            if not os.path.isdir(memory_dir):
                text = "memory_dir does not exist"
                raise MemoryTierError(text, operation="open", tier="memory", key=memory_dir, hint="make it")
            make_folders(root, FOLDERS, say)
            left = memory_left if is_tmpfs(memory_dir) else None
            tier = cls(root, budget_bytes=budget_bytes, unmap=unmap, left=left, clock=clock, say=say)
            clear_dead(root, clock)
        if left is None:
            say(f"memory_dir {memory_dir!r} is not on tmpfs: the memory tier will be as fast as that disk")
        return tier

    def mend(self) -> bool:
        """Makes the folders again if they were removed; returns whether they were. Raises errors of :meth:`open`."""
        if self._parts.is_dir():
            return False
        with opening(self.root):
            make_folders(self.root, FOLDERS, self._say)
        if self._spill is not None:
            # Before another process gives this memory a new id, with which it would not find the spill.
            self.open_spill()
        return True

    @property
    def replicas(self) -> MemoryTier:
        """The copies of other nodes' parts that this node keeps, with slots of their own."""
        if self._replicas is None:
            self._replicas = MemoryTier(
                self.root, budget_bytes=self.budget, folder=REPLICAS, left=self._left, clock=self._clock
            )
        self._replicas.place = self.place
        return self._replicas

    # --------------------------------------------------------------------------------- spill
    def use_spill(self, configured: str | None) -> None:
        """Takes the folder for parts that do not fit: see ``spill_dir`` of the configuration."""
        spill_dir = spill_dir_of(configured)
        # Jobs may use one namespace in several memory folders.
        name = f"{self.root.name}-{hash_bytes(os.path.realpath(self.root).encode())[:8]}"
        base = Path(spill_dir) / f"tiered-{os.getuid()}" / name if spill_dir is not None else None
        if base != self._spill_base:
            self._spill, self._spill_base, self._shares_disk = None, base, configured == AUTO

    @property
    def spill(self) -> MemoryTier | None:
        """The spill, once any process of this memory has made it."""
        if self._spill is None and self._spill_base is not None and _siblings(self._spill_base):
            self.open_spill(make=False)
        return self._spill

    def open_spill(self, *, make: bool = True) -> MemoryTier | None:
        """Returns the spill, which ``make`` has made if it is missing.

        None if there is none, or, with one warning, it can't be used.
        """
        base = self._spill_base
        if base is None:
            return None
        try:
            # Again each time: a cleaner of temporary folders may have taken some.
            os.makedirs(base.parent.parent, exist_ok=True)
            private_folder(base.parent)
            root = claim(base, self.root, self._clock, make=make)
            if root is None:
                return None
            make_folders(root, FOLDERS, self._say)
            if self._spill is None or self._spill.root != root:
                clear_dead(root, self._clock)
                self._spill = spill = MemoryTier(root, unmap=self.pool.unmap, clock=self._clock)
                spill.pool.bounded_by_disk()
                bound, shared = self._left is not None, self._shares_disk
                spill._left = lambda: disk_left(root, spill.usage(), is_shared=shared, is_bound=bound)
        except OSError as error:
            self._say(f"nothing is spilled to {base}: {getattr(error, 'message', error.strerror)}")
            # The next request asks again if other processes may free room; parts in the spill stay known.
            if not is_scarcity(error):
                self._spill_base = self._spill = None
            return None
        return self._spill

    def _home(self, path: Path | str) -> MemoryTier:
        """Returns the root of a path: this one, or the spill."""
        spill = self._spill
        return spill if spill is not None and Path(path).is_relative_to(spill.root) else self

    def is_spilled(self, path: Path | str) -> bool:
        """Returns True if a part's folder, or a slot's file, is in the spill."""
        return self._home(path) is not self

    @property
    def _roots(self) -> list[MemoryTier]:
        return [self, self.spill] if self.spill is not None else [self]

    # ------------------------------------------------------------------------------- looking
    def _entries(self) -> list[StoredPart | tuple[Path, Exception]]:
        found = [*self._index.scan()]
        with contextlib.suppress(FileNotFoundError):
            # A cleaner of temporary folders may have taken it.
            found += self.spill._entries() if self.spill is not None else []
        return found

    def parts(self) -> list[StoredPart]:
        """Returns all committed parts that can be read, in the order of their saves."""
        found = [entry for entry in self._entries() if isinstance(entry, StoredPart)]
        return sorted(found, key=lambda stored: (stored.save_id, stored.folder.name))

    def held(self) -> list[StoredPart]:
        """Returns :meth:`parts`, and after these the :attr:`replicas`."""
        return [*self.parts(), *self.replicas.parts()]

    def find(self, save_id: str, rank: int | None = None) -> StoredPart:
        """Returns a part of this node, or else the replica of it that this node keeps; of any rank if that is None.

        Raises CheckpointNotFoundError if there is none, or no longer.
        """
        # Looked for twice: a replica may become the node's own meanwhile.
        for stored in (*self.held(), *self.held()):
            if stored.save_id == save_id and rank in (None, stored.part.rank):
                return stored
        raise CheckpointNotFoundError("no longer in memory", operation="read", tier="memory", key=save_id)

    def unreadable(self) -> list[tuple[Path, Exception]]:
        """Returns folders whose ``part.json`` cannot be read, also of the :attr:`replicas`, and the errors."""
        entries = [*self._entries(), *self.replicas._entries()]
        return [entry for entry in entries if not isinstance(entry, StoredPart)]

    def quarantined(self) -> list[Path]:
        """Returns the folders of parts that were found corrupt."""
        return sorted(folder for tier in self._roots for folder in (tier.root / "quarantine").glob("*"))

    def usage(self) -> int:
        """Returns the number of bytes in use by this namespace on this node, free slots included."""
        return used(self.root)

    def room(self) -> int:
        """Returns the number of bytes that the budget, the file system, and the node's free memory still allow."""
        file_system = os.statvfs(self.root)
        bounds = [file_system.f_bavail * file_system.f_frsize]
        if self.budget is not None:
            bounds.append(self.budget - self.usage())
        if self._left is not None:
            bounds.append(self._left())
        return min(bounds)

    # ------------------------------------------------------------------------------- writing
    def acquire(self, size: int) -> Slot:
        """Returns a slot of ``size`` bytes; raises as :meth:`SlotPool.acquire` does."""
        return self.pool.acquire(size)

    def give_back(self, slot: Slot) -> None:
        """Returns a slot that will not be committed."""
        self._home(slot.path).pool.give_back(slot)

    def is_taken(self, save_id: str, rank: int) -> bool:
        """Returns True if a part's folder exists, readable or not."""
        return any((tier._parts / save_id / ids.rank_folder(rank)).exists() for tier in self._roots)

    def commit(
        self, part: Part, slots: Mapping[str, Slot | bytes], *, drained: bool = False, saved: bool = True
    ) -> StoredPart:
        """Commits a filled part, atomically.

        ``slots`` are its filled slots by basename, which belong to the tier afterwards, and small files as bytes.
        ``drained``: the durable tier has it already. ``saved``: it is of a save, of which peers are to get copies, and
        not of a restore.

        Raises:
            MemoryFullError: The file system is full; the part and its slots are removed.
            MemoryTierError: Memory holds it already.
        """
        # A rename does not work from one file system to another.
        home = next((self._home(slot.path) for slot in slots.values() if isinstance(slot, Slot)), self)
        folder = home._parts / part.save_id / ids.rank_folder(part.rank)
        what: Any = {"operation": "commit", "tier": "memory", "key": str(folder)}
        taken = partial(
            MemoryTierError, "memory already holds this part", **what, rank=part.rank, step=part.content.step
        )
        if self.is_taken(part.save_id, part.rank):
            raise taken()
        # A folder of its own: another process may be committing the same part.
        fresh = folder.with_name(f"{folder.name}.{self._clock.token(4)}{NEW}")
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            fresh.mkdir(mode=0o700)
            for entry in part.content.files:
                slot = slots[entry.basename]
                target = fresh / entry.basename
                if isinstance(slot, bytes):
                    write_private(target, slot)
                    continue
                os.rename(slot.path, target)
                slot.path = str(target)
                home.pool.committed(slot, entry.size)
            prepare_markers(fresh, drained=drained)
            write_private(fresh / PART_FILE, part.to_json())
            os.rename(fresh, folder)
        except BaseException as error:
            # Ctrl-C, too, leaves no remains that only another start would clear.
            is_full = isinstance(error, OSError) and (isinstance(error, MemoryFullError) or error.errno in NO_SPACE)
            # The files had their space, their description has none: give all of it back.
            for slot in slots.values() if is_full else ():
                if not isinstance(slot, bytes):
                    home.pool.take_back(slot.path, reuse=False)
            shutil.rmtree(fresh, ignore_errors=True)
            if is_full and not isinstance(error, MemoryFullError):
                raise MemoryFullError("no space for a folder", **what, hint=FULL_HINT) from error
            if isinstance(error, OSError) and not is_full and folder.exists():
                raise taken() from error
            raise
        stored = StoredPart(part, folder, drained)
        if stored.pending:
            self.bell()
        if saved and not drained and self.on_commit is not None:
            self.on_commit(stored)
        return stored

    def adopt(self, copy: StoredPart, *, drained: bool) -> StoredPart:
        """Makes one of the :attr:`replicas` this node's own part: the node that had it is lost."""
        folder = self._parts / copy.save_id / copy.folder.name
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            if drained:
                mark(copy.folder, DRAINED)
            os.rename(copy.folder, folder)
        except FileNotFoundError as error:
            raise gone(copy) from error
        with contextlib.suppress(OSError):
            os.rmdir(copy.folder.parent)
        self.bell()
        return StoredPart(copy.part, folder, drained, copy.replicated)

    def mark_drained(self, stored: StoredPart) -> None:
        """Notes that a part needs no upload any more, also after a power loss."""
        with contextlib.suppress(FileNotFoundError):
            mark(stored.folder, DRAINED, synced=True)

    def mark_replicated(self, stored: StoredPart) -> None:
        """Notes that all parts of this part's save are in the memory of other nodes as well."""
        with contextlib.suppress(FileNotFoundError):
            mark(stored.folder, REPLICATED)

    def mark_awaited(self, stored: StoredPart, *, is_awaited: bool) -> None:
        """Notes that a part's save is being replicated, or no longer; not of a part that is being removed."""
        before, after = (f".{AWAITED}", AWAITED) if is_awaited else (AWAITED, f".{AWAITED}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(stored.folder / before, stored.folder / after)

    def remove(self, stored: StoredPart) -> None:
        """Removes a part, unless it has become awaited; its files become free slots if this process filled them."""
        if not stored.awaited and not begin_removal(stored):
            return
        name = f"{self._parts.name}.{stored.save_id}.{stored.folder.name}.{os.getpid()}"
        home = self._home(stored.folder)
        trash = home.root / "trash" / name
        try:
            os.rename(stored.folder, trash)
            self._empty(trash, stored)
        except FileNotFoundError:
            return
        except BaseException:
            # Again after Ctrl-C: otherwise this memory would not be freed while this process lives.
            self._empty(trash, stored)
            raise

    def _empty(self, trash: Path, stored: StoredPart) -> None:
        with contextlib.suppress(OSError):
            sync_folder(stored.folder.parent)  # after a power loss it must not be there without its marks
            os.rmdir(stored.folder.parent)
        is_pinned, pool = (trash / PINNED).exists(), self._home(trash).pool
        for entry in stored.part.content.files:
            with contextlib.suppress(FileNotFoundError):
                pool.take_back(str(trash / entry.basename), reuse=not is_pinned)
        shutil.rmtree(trash, ignore_errors=True)

    def quarantine(self, folder: Path, reason: str) -> Path:
        """Takes a corrupt part's folder out of use, without deleting it; returns its new place."""
        mark = f"{REPLICAS}." if folder.parent.parent.name == REPLICAS else ""
        # A name of its own: a rename does not replace a folder of an earlier start, or of another rank.
        part = f"{mark}{folder.parent.name}.{folder.name}"
        target = self._home(folder).root / "quarantine" / f"{part}.{self._clock.token(4)}"
        target.parent.mkdir(mode=0o700, exist_ok=True)  # a corrupt part that stays would be tried for ever
        try:
            os.rename(folder, target)
        except FileNotFoundError:
            # Another process has found it, too.
            return target.parent
        with contextlib.suppress(FileNotFoundError, MemoryFullError):
            write_private(target / "reason.txt", reason.encode())
        with contextlib.suppress(OSError):
            os.rmdir(folder.parent)
        with contextlib.suppress(OSError):
            # Only one older copy of the part stays: each takes as much memory as the part.
            copies = [each for each in target.parent.iterdir() if part in (each.name, each.stem) and each != target]
            for each in sorted(copies, key=lambda each: each.stat().st_mtime_ns)[:-1]:
                shutil.rmtree(each, ignore_errors=True)
        return target

    def close(self) -> None:
        """Gives free slots back to the node; committed parts stay."""
        self.pool.close()
        for tier in (self._replicas, self._spill):
            if tier is not None:
                tier.close()


class Space(NamedTuple):
    """Bytes of one root: those of checkpoints, and those that checkpoints may still take. Idle slots are free."""

    used: int
    free: int


def note_budget(tier: MemoryTier) -> None:
    """Notes the budget of the trainer's checkpoints; on a full tmpfs, nothing is noted."""
    path, text = tier.root / BUDGET_FILE, str(tier.budget).encode()
    with contextlib.suppress(OSError):
        if tier.budget is not None and not (path.exists() and path.read_bytes() == text):
            write_atomic(path, text)


def noted_budget(root: Path) -> int | None:
    """Returns the budget of the last trainer over a memory tier, bytes; None if none was noted."""
    with contextlib.suppress(OSError, ValueError):
        return int((root / BUDGET_FILE).read_bytes())
    return None


def space_of(tier: MemoryTier) -> Space:
    """Returns a tier's used and free space; a slot that is being filled counts as free; raises OSError."""
    idle = used(tier.root / "slots")
    return Space(max(0, tier.usage() - idle), max(0, tier.room()) + idle)
