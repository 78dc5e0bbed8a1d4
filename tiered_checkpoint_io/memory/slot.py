"""One file of node memory that is mapped in this process, and recycled: see :mod:`memory.slots`."""

from __future__ import annotations

import os
from collections.abc import Callable

from tiered_checkpoint_io.memory import forks
from tiered_checkpoint_io.memory.pages import HUGE, LEAST, Mapped, take_space
from tiered_checkpoint_io.memory.private import inode_at, inode_of


class Slot:
    """A mapped file of this process, filled and then committed.

    Attributes:
        path: Where the file lies now.
        capacity: Bytes that are mapped. Address space costs nothing, so there are more of them
            than the file has: a state that grows a little keeps its mapping.
        reserved: Bytes, from the start, whose space is taken. Nothing beyond may be touched.
        touched: Bytes, from the start, whose pages are in this mapping, or huge. Others cost a fault each when they are
            first written by it, which is more than to write them by the descriptor.
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
        forks.register(self)

    @property
    def view(self) -> memoryview:
        """The slot's bytes, writable, as far as they are mapped."""
        return self.mapped.view

    @property
    def unlinked(self) -> bool:
        """Whether the file has lost its last name, so that only this mapping keeps its pages."""
        return os.fstat(self.descriptor).st_nlink == 0

    @property
    def in_place(self) -> bool:
        """Whether its path still leads to the file: others may have moved its folder, or mounted over it."""
        return inode_at(self.path) == self.inode

    def reserve(self, size: int, *, patient: bool = False) -> None:
        """Takes the space of the first ``size`` bytes, a part of which may be taken; see :func:`pages.take_space`."""
        if self.reserved < size:
            huge = take_space(self.descriptor, self.reserved, size, patient=patient)
            if self.huge == self.reserved:
                self.huge = huge
            if self.touched == self.reserved:
                # A fault for each of these pages is none too many.
                self.touched = huge
            self.reserved = size
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def cut(self, size: int) -> None:
        """Makes the file exactly ``size`` bytes long."""
        os.ftruncate(self.descriptor, size)
        self.reserved, self.touched, self.huge = (min(each, size) for each in (self.reserved, self.touched, self.huge))

    def small(self, size: int) -> tuple[int, int] | None:
        """Of the first ``size`` bytes, which are taken, a few whose pages may be made huge."""
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
        """See :class:`forks.Owner`: a copy of the descriptor would keep the lock of a parent that has died."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
