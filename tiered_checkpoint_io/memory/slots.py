"""Recycled, memory-mapped files that images are filled into.

The first touch of a fresh page of tmpfs costs more than copying into it. Slots are therefore reused: a slot keeps its
mapping in this process while its file moves from ``slots/`` into a checkpoint's folder and back. Space is taken by
``posix_fallocate``, so that a full file system is an error here and never a SIGBUS at a later write.

The owner of a file in ``slots/`` holds an exclusive lock on it; one without a lock was left by a dead process.

To take and to touch 2 MiB in pages of 4 KiB costs several times what one huge page does, and each process that maps the
file later pays again for each of them. Mounts of tmpfs rarely use huge pages by themselves, but the kernel makes one of
a stretch of a file on request (Linux 6.1). If it can't, or has none left, saves work all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.memory.node import MemoryFullError, alone_in, inode_at, inode_of, needs_space, register_owner

HUGE = 2 << 20
#: Less than that is quickly touched.
LEAST = 4 * HUGE
#: Bytes made huge by one call at most; the first ones are small, to measure the cost.
_STEP = 64 << 20
#: Processor time of a huge page, seconds: beyond the first, small ones take less, so that waiting saves take
#: these; beyond the second, the kernel is not asked at all: it must move other pages away, or a virtual machine must
#: get the page from its host.
_SLOW_S, _TOO_SLOW_S = 0.002, 0.05
#: Time until the kernel is asked again after a slow or refused page, seconds.
_REST_S = 60.0
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_TMPFS = 0x01021994
#: Linux's, which Python does not name.
_MADV_COLLAPSE = 25
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

#: Times of the monotonic clock until when the kernel is not asked at all, and not by waiting saves.
_resting_until = _slow_until = 0.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Mapped:
    """A file's bytes, mapped at a multiple of :data:`HUGE`.

    Attributes:
        content: The bytes stay mapped until this, and all objects made of it, are gone. No ``__del__`` may read them.
        address: Address of the pages.
    """

    def __init__(self, descriptor: int, size: int, *, start: int = 0, shared: bool) -> None:
        """Maps ``size`` bytes, 1 at least, from ``start`` on, a multiple of :data:`HUGE`, for reading and writing.

        If ``shared``, writes get into the file; otherwise a descriptor that is open for reading is enough.
        """
        # Room that surely contains such a multiple; the rest is given back.
        around = size + HUGE
        found = _map(None, around, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        self.address = -(-found // HUGE) * HUGE
        end = self.address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | _MAP_FIXED
            _map(self.address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, start)
        finally:
            # If the call failed, the range may be another thread's by now.
            if self.address > found:
                _libc.munmap(found, self.address - found)
            if found + around > end:
                _libc.munmap(end, found + around - end)
        if shared:
            # A worker that outlives its trainer would keep the pages of files that are long unlinked.
            self.advise(mmap.MADV_DONTFORK, 0, size)
        self.content = (ctypes.c_char * size).from_address(self.address)
        # When the process ends, a thread may still be at it.
        owner = os.getpid() if shared else None
        weakref.finalize(self.content, _unmap, self.address, size, owner).atexit = False

    @property
    def view(self) -> memoryview:
        """All mapped bytes."""
        return memoryview(self.content).cast("B")

    def advise(self, advice: int, start: int, length: int) -> bool:
        """Calls ``madvise``, without the interpreter's lock; returns whether the kernel did it."""
        return bool(_libc.madvise(self.address + start, length, advice) == 0)


def take_space(descriptor: int, start: int, end: int, *, patient: bool = False) -> int:
    """Takes the space of a file's bytes from ``start`` up to ``end``; a part of it may be taken already.

    If it is ``patient``, as no thread waits, huge pages are taken although small ones take less time. Returns the end
    of the bytes in huge pages; ``start`` if there are none. Raises OSError if there is not enough space.
    """
    low, high, huge = -(-start // HUGE) * HUGE, end // HUGE * HUGE, start
    if high - low >= LEAST and are_worth_asking(descriptor, patient=patient):

        def take(at: int, to: int) -> bool:
            # The kernel makes no huge page of an empty stretch.
            return all(_libc.fallocate(descriptor, 0, low + each, mmap.PAGESIZE) == 0 for each in range(at, to, HUGE))

        # Without memory for a mapping, small pages do.
        with contextlib.suppress(OSError):
            mapped = Mapped(descriptor, high - low, start=low, shared=True)
            done = make_huge(mapped, 0, high - low, take, patient=patient)
            huge = low + done if done else start
    os.posix_fallocate(descriptor, start, end - start)
    return huge


def are_slow() -> bool:
    """Returns whether the kernel has lately taken long for huge pages."""
    return time.monotonic() < _slow_until


def are_worth_asking(descriptor: int, *, patient: bool) -> bool:
    """Returns whether the kernel may give huge pages for a file, and is not known to be slow."""
    until = _resting_until if patient else max(_resting_until, _slow_until)
    return time.monotonic() >= until and _are_there() and _is_on_tmpfs(descriptor)


def make_huge(
    mapped: Mapped, start: int, end: int, take: Callable[[int, int], bool] | None = None, *, patient: bool
) -> int:
    """Makes pages of a mapped file huge, as far as the kernel does it; bytes that are there stay.

    Both ends are multiples of :data:`HUGE`; each stretch of so many bytes has a page, or ``take`` makes it, from one
    place up to another, and returns whether it could. Returns the end of the huge pages; ``start`` for none.
    """
    global _resting_until, _slow_until
    low, step = start, _STEP if patient else HUGE
    while low < end:
        high = min(low + step, end)
        is_taken = take is None or take(low, high)
        began = time.thread_time()
        gives = is_taken and mapped.advise(_MADV_COLLAPSE, low, high - low)
        each_s, until = (time.thread_time() - began) / ((high - low) // HUGE), time.monotonic() + _REST_S
        if each_s > _SLOW_S:
            _slow_until = until
        # The kernel may refuse pages that are there, such as pinned ones.
        if (take is not None and not gives) or each_s > _TOO_SLOW_S:
            _resting_until = until
        low, step = high if gives else low, min(2 * step, _STEP)
        if not gives or each_s > (_TOO_SLOW_S if patient else _SLOW_S):
            break
    return low


@functools.cache
def _are_there() -> bool:
    """Returns True if this kernel has huge pages of this module's size."""
    try:
        return int(_SIZE_FILE.read_text()) == HUGE
    except (OSError, ValueError):
        return False


def _is_on_tmpfs(descriptor: int) -> bool:
    # Its type comes first in the kernel's answer about a file system.
    facts = (ctypes.c_long * 64)()
    return bool(_libc.fstatfs(descriptor, facts) == 0 and facts[0] == _TMPFS)


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int, start: int) -> int:
    found: int = _libc.mmap(address, size, protection, flags, descriptor, start)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _unmap(address: int, size: int, owner: int | None) -> None:
    # A forked child does not have shared mappings: another mapping may lie there by then.
    if owner in (None, os.getpid()):
        _libc.munmap(address, size)


_ROUND = 2 << 20
#: Bytes prepared at once: a save waits for them, and others get the memory map's lock between two pieces.
_PIECE = 8 << 20
#: Pause between two pieces that are pinned, so that training can launch its kernels.
_PIN_PAUSE_S = 0.05
#: Linux 5.14; older kernels answer EINVAL, and the pages are then touched by the first copy.
_MADV_POPULATE_WRITE = 23
#: Free slots that are worth their memory: one for the next save and one for a pending one.
_MAX_FREE = 2


class Slot:
    """A mapped file of this process, filled and then committed.

    Attributes:
        path: Present path of the file.
        capacity: Bytes that are mapped. More than the file has, because address space costs nothing: a state that grows
            a little keeps its mapping.
        reserved: Bytes, from the start, whose space is taken. Do not touch bytes beyond.
        touched: Bytes, from the start, whose pages are there. A first write to another page costs a fault, more than a
            write by the descriptor.
        huge: Bytes, from the start, whose pages are huge, or are to stay small.
        inode: The file's identity, which survives its renames: its device, and its number there.
        mapped: Its bytes, until it is closed.
    """

    def __init__(self, path: str, descriptor: int, capacity: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.capacity = capacity
        self.reserved = self.touched = self.huge = 0
        self.mapped = Mapped(descriptor, capacity, shared=True)
        self.inode = inode_of(os.fstat(descriptor))
        register_owner(self)

    @property
    def view(self) -> memoryview:
        """The slot's bytes, writable, as far as they are mapped."""
        return self.mapped.view

    @property
    def unlinked(self) -> bool:
        """True if the file has lost its last name, so that only this mapping keeps its pages."""
        return os.fstat(self.descriptor).st_nlink == 0

    def reserve(self, size: int, *, patient: bool = False) -> None:
        """Takes the space of the first ``size`` bytes, a part of which may be taken; see :func:`pages.take_space`."""
        if self.reserved < size:
            huge = take_space(self.descriptor, self.reserved, size, patient=patient)
            if self.huge == self.reserved:
                self.huge = huge
            if self.touched == self.reserved:
                # A fault for each of these pages is affordable.
                self.touched = huge
            self.reserved = size
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def cut(self, size: int) -> None:
        """Makes the file exactly ``size`` bytes long."""
        os.ftruncate(self.descriptor, size)
        self.reserved, self.touched, self.huge = (min(each, size) for each in (self.reserved, self.touched, self.huge))

    def small(self, size: int) -> tuple[int, int] | None:
        """Returns a short range of the first ``size`` bytes, which are taken, whose pages may be made huge."""
        start, end = -(-self.huge // HUGE) * HUGE, size // HUGE * HUGE
        return (start, min(start + LEAST, end)) if start < end and size >= LEAST else None

    def close(self, unmap: Callable[[memoryview, int], None] | None = None) -> None:
        """Unmaps and closes the file; its name, if any, stays."""
        if unmap is not None:
            unmap(self.view, 0)
        # A view that someone still holds keeps the mapping alive; it goes with that view.
        del self.mapped
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)

    def forked(self) -> None:
        """See :class:`node.Owner`: a copy of the descriptor would keep the lock of a parent that has died."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SlotPool:
    """Makes, lends and takes back the slots of this process, in one folder."""

    def __init__(
        self, folder: str, room: Callable[[], int], clock: Clock, unmap: Callable[[memoryview, int], None] | None = None
    ) -> None:
        """Makes an empty pool over a folder; ``room`` returns the bytes that the budget still allows.

        ``unmap`` is called with each mapping that loses pages, and the number of bytes that keep theirs: registered
        pinned memory consists of these pages, and a device would still copy into them.
        """
        self._folder = folder
        self._room = room
        self._clock = clock
        self.unmap = unmap
        #: Cause of the limit of bytes, and advice if that is too few; see :meth:`bounded_by_disk`.
        self._bound = "the budget and the node's free memory allow"
        self._hint = "give memory_dir more space, raise memory_allocation_percentage, or name a spill_dir"
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._lent: dict[tuple[int, int], Slot] = {}
        register_owner(self)

    def forked(self) -> None:
        """See :class:`node.Owner`."""
        self._lock = threading.Lock()
        self._free, self._lent = [], {}

    def bounded_by_disk(self) -> None:
        """Has errors say that a disk has no room: these slots are those of a spill."""
        self._bound, self._hint = "the disk allows", "give spill_dir more space"

    def acquire(self, size: int) -> Slot:
        """Returns a slot with ``size`` bytes of space taken on the file system.

        Raises MemoryFullError if the budget or the file system has no room; then it only gives free slots up.
        """
        with self._lock:
            self._drop_unlinked()
            slot = self._best(size)
            if slot is None:
                # Free slots that are too small only take the space of the larger one.
                self._discard_free()
                slot = self._make(size)
            else:
                self._free.remove(slot)
            try:
                self._reserve(slot, size if slot.reserved else _round_up(size))
            except BaseException:
                self._discard(slot)
                self._discard_free()
                raise
            self._lent[slot.inode] = slot
            return slot

    def is_prepared(self, size: int) -> bool:
        """Returns True if a free slot needs no further :meth:`prepare`."""
        with self._lock:
            return any(min(slot.reserved, slot.touched) >= size and not slot.small(size) for slot in self._free)

    def prepare(self, size: int, stopped: Callable[[], bool], pin: Callable[[memoryview], bool] | None = None) -> None:
        """Makes a free slot of ``size`` bytes and touches its pages, if there is room and need, until ``stopped``.

        Piece by piece; a save can acquire the slot as far as it is made, and waits for one piece at most. Likewise,
        ``pin`` is then called with the bytes of the slot, as often as it says that there is another piece.
        """
        slot = self._to_prepare(size, stopped)
        while slot is not None and self._prepare_piece(slot, size, stopped):
            pass
        while slot is not None and pin is not None:
            with self._lock:
                if stopped() or slot not in self._free or min(slot.reserved, slot.touched) < size:
                    return
                if not pin(slot.view[:size]):
                    return
            self._clock.sleep(_PIN_PAUSE_S)

    def _to_prepare(self, size: int, stopped: Callable[[], bool]) -> Slot | None:
        with self._lock:
            slot = self._best(size)
            if slot is None and not stopped() and len(self._free) < _MAX_FREE:
                # No room, or no descriptor: the next save will say so, if it needs them.
                with contextlib.suppress(OSError):
                    if self._room() >= _round_up(size):
                        slot = self._make(size)
                        self._free.append(slot)
            return slot

    def _prepare_piece(self, slot: Slot, size: int, stopped: Callable[[], bool]) -> bool:
        """Takes space for one more piece of a free slot, or makes it huge, or touches it; returns True to continue."""
        with self._lock:
            if stopped() or slot not in self._free:
                return False
            if slot.reserved < size:
                try:
                    self._reserve(slot, min(slot.reserved + _PIECE, _round_up(size)), patient=True)
                except OSError:
                    self._free.remove(slot)
                    self._discard(slot)
                return True
            small = slot.small(size)
            if small is not None and not are_worth_asking(slot.descriptor, patient=True):
                slot.huge, small = size, None
            if small is None and slot.touched >= size:
                return False
            # The mapping stays even if the slot is taken, and closed, meanwhile.
            mapped = slot.mapped
        if small is not None:
            start, end = small
            huge = make_huge(mapped, start, end, patient=True)
            with self._lock:
                if slot in self._free:
                    slot.huge = huge if huge == end else size
                    slot.touched = max(slot.touched, huge) if slot.touched >= start else slot.touched
            return True
        start = slot.touched - slot.touched % mmap.PAGESIZE
        end = min(start + _PIECE, size)
        is_touched = mapped.advise(_MADV_POPULATE_WRITE, start, end - start)
        with self._lock:
            if slot in self._free:
                # If the kernel can't, the first copy does it.
                slot.touched = end if is_touched else size
        return True

    def give_back(self, slot: Slot) -> None:
        """Returns a lent slot that was not committed."""
        with self._lock:
            self._lent.pop(slot.inode, None)
            if os.path.dirname(slot.path) != self._folder:
                # The slot was on its way into a checkpoint that did not come to be.
                self._discard(slot)
            else:
                self._keep_or_discard(slot)

    def committed(self, slot: Slot, size: int) -> None:
        """Notes that the slot's file was moved into a checkpoint's folder."""
        if self.unmap is not None:
            self.unmap(slot.view, size)
        slot.cut(size)
        fcntl.flock(slot.descriptor, fcntl.LOCK_UN)

    def take_back(self, path: str, *, reuse: bool) -> None:
        """Takes the file at ``path`` back as a free slot; unlinks it if it can't be reused, or is not to be.

        A file that a reader has mapped (which then holds a shared lock on it) is unlinked: its bytes
        stay for that reader, unchanged.
        """
        with self._lock:
            slot = self._lent.pop(inode_of(os.stat(path)), None)
            if slot is None:
                os.unlink(path)
                return
            slot.path = path
            # A reader may have it, or another process have removed the folder.
            with contextlib.suppress(OSError):
                if reuse:
                    fcntl.flock(slot.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free_name = os.path.join(self._folder, self._slot_name())
                    os.rename(path, free_name)
                    slot.path = free_name
            if slot.path == path:
                self._discard(slot)
            else:
                self._keep_or_discard(slot)

    def close(self) -> None:
        """Unlinks free slots and unmaps the others; committed files stay."""
        with self._lock:
            self._discard_free()
            for slot in self._lent.values():
                slot.close(self.unmap)
            self._lent.clear()

    def _best(self, size: int) -> Slot | None:
        """Returns the free slot that needs the least to hold ``size`` bytes, if any can."""
        fitting = [slot for slot in self._free if slot.capacity >= size]
        return min(
            fitting,
            key=lambda free: (max(0, size - free.reserved), -min(free.touched, size), free.reserved),
            default=None,
        )

    def _make(self, size: int) -> Slot:
        """Returns a new slot, without space yet."""
        while True:
            path = os.path.join(self._folder, self._slot_name())
            with needs_space("no space for one more file", operation="stage", key=path, hint=self._hint):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink == 0:
                    # Another process came between, took the file for a dead process's, and unlinked it.
                    os.close(descriptor)
                    continue
                slot = Slot(path, descriptor, _round_up(size + size // 16 + 1))
            except BaseException:
                os.unlink(path)
                os.close(descriptor)
                raise
            return slot

    def _reserve(self, slot: Slot, size: int, *, patient: bool = False) -> None:
        if size <= slot.reserved:
            slot.reserve(size)
            return
        # One process at a time looks at the free room and takes it.
        with alone_in(self._folder, "reserving memory", self._clock):
            need, room = size - slot.reserved, self._room()
            if need > room:
                raise MemoryFullError(
                    f"a checkpoint of {size} bytes does not fit: {need} more are needed, {self._bound} {max(room, 0)}",
                    operation="stage",
                    tier="memory",
                    key=self._folder,
                    hint=self._hint,
                )
            text = f"no space for a checkpoint of {size} bytes"
            with needs_space(text, operation="stage", key=slot.path, hint=self._hint):
                slot.reserve(size, patient=patient)

    def _slot_name(self) -> str:
        return f"slot-{os.getpid()}-{self._clock.token(6)}"

    def _drop_unlinked(self) -> None:
        """Unmaps files that others removed, or moved away: a mapping keeps their pages in memory."""
        for inode, slot in list(self._lent.items()):
            if slot.unlinked:
                del self._lent[inode]
                slot.close(self.unmap)
        # Other processes may have moved its folder, or mounted over it.
        for slot in [free for free in self._free if inode_at(free.path) != free.inode]:
            self._free.remove(slot)
            slot.close(self.unmap)

    def _keep_or_discard(self, slot: Slot) -> None:
        if len(self._free) < _MAX_FREE:
            self._free.append(slot)
        else:
            self._discard(slot)

    def _discard_free(self) -> None:
        while self._free:
            self._discard(self._free.pop())

    def _discard(self, slot: Slot) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(slot.path)
        slot.close(self.unmap)


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


def _round_up(size: int) -> int:
    return -(-max(size, 1) // _ROUND) * _ROUND
