"""Bytes written to a buffer's file by its descriptor: for pages that the buffer's mapping has not touched yet.

A page that a mapping meets for the first time is a fault, which costs more than the copy into it. To write it does
not. What is written is put together, and hashed, in a small buffer that stays in a core's cache.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple


class Untouched(NamedTuple):
    """Which pages of a mapped file a mapping has not touched.

    Attributes:
        descriptor: The file.
        start: From this byte on.
    """

    descriptor: int
    start: int


class Written:
    """Takes the place of a stretch of the mapping: a piece of it at a time."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Takes the file, and the size of the largest piece."""
        self._descriptor = descriptor
        self._buffer = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self._buffer)

    def content(self, nbytes: int) -> memoryview:
        """The first bytes of the buffer."""
        return memoryview(self._buffer).cast("B")[:nbytes]

    def write(self, nbytes: int, offset: int) -> None:
        """Writes the first bytes of the buffer to their place in the file."""
        left = self.content(nbytes)
        while left:
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written
