"""Pages of files on tmpfs: their space is taken in huge pages, and mapped so that each of these is one page, too.

To take and to touch 2 MiB in pages of 4 KiB costs several times what one huge page does, and each process that maps the
file later pays again for each of them. Mounts of tmpfs rarely use huge pages by themselves, but the kernel makes one of
a stretch of a file on request (Linux 6.1). If it can't, or has none left, saves work all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

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
        """Maps ``size`` bytes from ``start`` on, a multiple of :data:`HUGE`, for reading and writing.

        Args:
            descriptor: The file; open for reading is enough if ``shared`` is False.
            size: 1 at least.
            start: Offset in the file.
            shared: True if writes get into the file.

        Raises:
            OSError: There is no memory for it.
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

    Args:
        descriptor: The file.
        start: Bytes from its start.
        end: The same.
        patient: True if no thread waits: huge pages are taken although small ones take less time.

    Returns:
        The end of the bytes in huge pages; ``start`` if there are none.

    Raises:
        OSError: There is not enough space.
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

    Args:
        mapped: The file, of which each stretch of :data:`HUGE` bytes has a page at least.
        start: Bytes from the mapping's start, a multiple of :data:`HUGE`.
        end: The same.
        take: Makes that page from one place up to another; returns whether it could.
        patient: As :func:`take_space` takes it.

    Returns:
        The end of the huge pages; ``start`` for none.
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
