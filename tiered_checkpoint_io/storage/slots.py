"""Recycled, memory-mapped files that images are filled into.

The first touch of a fresh page of tmpfs costs more than copying into it. Slots are therefore
reused: a slot keeps its mapping in this process while its file moves from ``slots/`` into a
checkpoint's folder and back. Space is taken by ``posix_fallocate``, so that a full file system is
an error here and never a SIGBUS at a later write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable

from tiered_checkpoint_io.errors import MemoryFullError

_ROUND = 2 << 20
#: Linux 5.14; older kernels answer EINVAL, and the pages are then touched by the first copy.
_MADV_POPULATE_WRITE = 23
#: Free slots that are worth their memory: one for the next save and one for a pending one.
_MAX_FREE = 2


class Slot:
    """A mapped file with room for ``capacity`` bytes, owned by this process until committed."""

    def __init__(self, path: str, descriptor: int, capacity: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.capacity = capacity
        self.mapping = mmap.mmap(descriptor, capacity)
        self.inode = os.fstat(descriptor).st_ino

    @property
    def view(self) -> memoryview:
        """The slot's bytes, writable."""
        return memoryview(self.mapping)

    def populate(self) -> None:
        """Touches every page, where the kernel can do so without changing them."""
        with contextlib.suppress(OSError, ValueError):
            self.mapping.madvise(_MADV_POPULATE_WRITE)

    def close(self, unmap: Callable[[memoryview], None] | None = None) -> None:
        """Unmaps and closes the file; its name, if any, stays."""
        if unmap is not None:
            unmap(memoryview(self.mapping))
        # A view that someone still holds keeps the mapping alive; it goes with that view.
        with contextlib.suppress(BufferError):
            self.mapping.close()
        os.close(self.descriptor)


class SlotPool:
    """Makes, lends and takes back the slots of this process, in one folder."""

    def __init__(self, folder: str, room: Callable[[], int], unmap: Callable[[memoryview], None] | None = None) -> None:
        """Makes an empty pool.

        Args:
            folder: Where free slots lie.
            room: Bytes that the budget still allows, beyond what is in use.
            unmap: Told of each mapping before it ends (to end its registration as pinned memory).
        """
        self._folder = folder
        self._room = room
        self._unmap = unmap
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._lent: dict[int, Slot] = {}

    def acquire(self, size: int) -> Slot:
        """A slot with ``size`` bytes of space taken on the file system.

        Raises:
            MemoryFullError: The budget or the file system has no room; nothing changed.
        """
        with self._lock:
            fitting = [slot for slot in self._free if slot.capacity >= size]
            slot = min(fitting, key=lambda candidate: candidate.capacity, default=None)
            if slot is None:
                # What is free but too small only stands in the way of the larger one.
                while self._free:
                    self._discard(self._free.pop())
                slot = self._make(size)
            else:
                self._free.remove(slot)
                self._allocate(slot.descriptor, size, slot.path)
            self._lent[slot.inode] = slot
            return slot

    def prepare(self, size: int) -> None:
        """Makes a free slot of ``size`` bytes and touches its pages, where there is room and need."""
        with self._lock:
            if any(slot.capacity >= size for slot in self._free):
                return
            try:
                slot = self._make(size)
            except MemoryFullError:
                # The next save will say so, if it needs the room.
                return
        slot.populate()
        with self._lock:
            self._free.append(slot)

    def give_back(self, slot: Slot) -> None:
        """Returns a lent slot that was not committed."""
        with self._lock:
            self._lent.pop(slot.inode, None)
            self._keep_or_discard(slot)

    def committed(self, slot: Slot, size: int) -> None:
        """Tells that the slot's file was moved into a checkpoint's folder."""
        os.ftruncate(slot.descriptor, size)
        fcntl.flock(slot.descriptor, fcntl.LOCK_UN)

    def recycle(self, path: str) -> bool:
        """Takes the file at ``path`` back as a free slot; unlinks it where it can't be reused.

        A file that somebody has mapped for reading (who then holds a shared lock on it) is
        unlinked: its bytes live on for that reader, and nobody writes to them.
        """
        with self._lock:
            slot = self._lent.pop(os.stat(path).st_ino, None)
            if slot is None:
                os.unlink(path)
                return False
            try:
                fcntl.flock(slot.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.unlink(path)
                slot.close(self._unmap)
                return False
            free_name = os.path.join(self._folder, _slot_name())
            os.rename(path, free_name)
            slot.path = free_name
            self._keep_or_discard(slot)
            return True

    def forget(self, path: str) -> None:
        """Unlinks the file at ``path`` and never reuses it."""
        with self._lock:
            slot = self._lent.pop(os.stat(path).st_ino, None)
            os.unlink(path)
            if slot is not None:
                slot.close(self._unmap)

    def release_free(self) -> None:
        """Gives the space of all free slots back to the node."""
        with self._lock:
            while self._free:
                self._discard(self._free.pop())

    def close(self) -> None:
        """Unlinks free slots and unmaps the others; committed files stay."""
        self.release_free()
        with self._lock:
            for slot in self._lent.values():
                slot.close(self._unmap)
            self._lent.clear()

    def _make(self, size: int) -> Slot:
        capacity = -(-max(size, 1) // _ROUND) * _ROUND
        room = self._room()
        if capacity > room:
            raise MemoryFullError(
                f"a checkpoint of {size} bytes does not fit: the budget leaves {max(room, 0)} bytes",
                operation="stage",
                tier="memory",
                key=self._folder,
                hint="raise memory_allocation_percentage, lower memory_keep_last, or give memory_dir more space",
            )
        path = os.path.join(self._folder, _slot_name())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._allocate(descriptor, capacity, path)
            return Slot(path, descriptor, capacity)
        except BaseException:
            os.unlink(path)
            os.close(descriptor)
            raise

    def _allocate(self, descriptor: int, size: int, path: str) -> None:
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                raise
            raise MemoryFullError(
                f"no space for a checkpoint of {size} bytes",
                operation="stage",
                tier="memory",
                key=path,
                hint="memory_dir is full: give it more space (docker: --shm-size), or lower memory_keep_last",
            ) from error

    def _keep_or_discard(self, slot: Slot) -> None:
        if len(self._free) < _MAX_FREE:
            self._free.append(slot)
        else:
            self._discard(slot)

    def _discard(self, slot: Slot) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(slot.path)
        slot.close(self._unmap)


def clean_dead(folder: str) -> None:
    """Unlinks slots whose owner died: a live owner holds an exclusive lock on each of its slots."""
    for entry in os.listdir(folder):
        path = os.path.join(folder, entry)
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _slot_name() -> str:
    return f"slot-{os.getpid()}-{secrets.token_hex(6)}"
