"""Which bytes of a file come from which addresses: a call for each long stretch, and one for hundreds of short ones.

A call costs as much as copying some KiB. Of a state of many tensors, most stretches are short: between any two tensors'
bytes stand about 128 bytes of the zip file, and optimizers keep a number for each parameter.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any, cast

import numpy as np

#: A stretch of fewer bytes is short; two windows of a power of two cover it.
_SHORT = 2 << 10
#: Fewer short stretches in a chunk than this are copied one by one.
_FEW = 64
#: Bytes of short stretches that are copied at once: they pass through a buffer, which is to stay in the cache.
_AT_ONCE = 256 << 10

_Integers = np.ndarray[Any, np.dtype[np.int64]]


class Copies:
    """All copies into one buffer."""

    def __init__(
        self,
        target: ctypes.Array[Any],
        offsets: _Integers,
        lengths: _Integers,
        addresses: _Integers,
        *,
        cuts: tuple[int, int],
    ) -> None:
        """Cuts stretches up.

        Args:
            target: The buffer, which is not kept alive.
            offsets: Where in it the bytes of each stretch belong; none overlap.
            lengths: How many there are.
            addresses: Where they lie.
            cuts: The sizes of a chunk and of a piece, bytes; a chunk is so many pieces.
        """
        chunk, piece = cuts
        order = np.argsort(offsets, kind="stable")
        order = order[lengths[order] > 0]
        offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
        chunks = offsets // chunk
        short = (lengths < _SHORT) & ((offsets + lengths - 1) // chunk == chunks)
        self._base, self._size = ctypes.addressof(target), len(target)
        #: By the chunks' numbers: which short stretches are copied together, and by windows of how many bytes.
        self._groups: dict[int, list[tuple[int, int, int]]] = {}
        if np.count_nonzero(short) >= _FEW * -(-len(target) // chunk):
            self._take_short(chunks[short], offsets[short], lengths[short], addresses[short])
            long = ~short
            offsets, lengths, addresses = offsets[long], lengths[long], addresses[long]
        self._take_long(offsets, lengths, addresses, piece)

    def _take_short(self, chunks: _Integers, offsets: _Integers, lengths: _Integers, addresses: _Integers) -> None:
        # The power of two that is at most the length.
        widths = 1 << (np.frexp(lengths)[1].astype(np.int64) - 1)
        order = np.lexsort((widths, chunks))
        chunks, widths = chunks[order], widths[order]
        self._offsets, self._lengths, self._addresses = offsets[order], lengths[order], addresses[order]
        ends = np.flatnonzero(np.diff(chunks, append=-1) | np.diff(widths, append=0)) + 1
        start = 0
        for end in ends.tolist():
            self._groups.setdefault(int(chunks[start]), []).append((start, end, int(widths[start])))
            start = end
        self._low = int(addresses.min())
        self._span = int((addresses + lengths).max()) - self._low

    def _take_long(self, offsets: _Integers, lengths: _Integers, addresses: _Integers, piece: int) -> None:
        ends = offsets + lengths
        first = offsets // piece
        counts = (ends - 1) // piece - first + 1
        rows = np.repeat(np.arange(len(offsets)), counts)
        pieces = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        lows, highs = np.maximum(offsets[rows], pieces * piece), np.minimum(ends[rows], (pieces + 1) * piece)
        self._columns = (
            (self._base + lows).tolist(),
            (addresses[rows] + (lows - offsets[rows])).tolist(),
            (highs - lows).tolist(),
        )
        self._cuts = np.searchsorted(pieces, np.arange(-(-self._size // piece) + 1)).tolist()

    @property
    def calls(self) -> int:
        """How many stretches are copied by calls of their own."""
        return len(self._columns[0])

    def copy_long(self, piece: int, away: int = 0) -> None:
        """Copies all but the short stretches of a piece, by its number, to ``away`` bytes beyond the buffer's own."""
        start, end = self._cuts[piece : piece + 2]
        targets, sources, lengths = (column[start:end] for column in self._columns)
        if away:
            targets = [target + away for target in targets]
        # No line of Python for each, of which there may be thousands. A call releases the interpreter lock, unlike a
        # copy between memoryviews.
        deque(map(ctypes.memmove, targets, sources, lengths), 0)

    def has_short(self, chunk: int) -> bool:
        """Whether :meth:`copy_short` copies anything of a chunk, by its number."""
        return chunk in self._groups

    def copy_short(self, chunk: int) -> None:
        """Copies the short stretches of a chunk, by its number."""
        target = (ctypes.c_char * self._size).from_address(self._base)
        for start, end, width in self._groups.get(chunk, ()):
            memory = (ctypes.c_char * self._span).from_address(self._low)
            sources, targets = _windows(memory, width), _windows(target, width)
            for at in range(start, end, _AT_ONCE // width):
                some = slice(at, min(at + _AT_ONCE // width, end))
                offsets, places = self._offsets[some], self._addresses[some] - self._low
                targets[offsets] = sources[places]
                rest = self._lengths[some] - width
                if np.any(rest):
                    targets[offsets + rest] = sources[places + rest]


def _windows(memory: ctypes.Array[Any], width: int) -> np.ndarray[Any, Any]:
    """As many items as there are bytes at which one may begin."""
    return np.ndarray((len(memory) - width + 1,), f"V{width}", cast("Any", memory), strides=(1,))
