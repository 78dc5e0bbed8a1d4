"""Which bytes of a file come from which addresses: one call copies as many stretches as a piece of the file has.

A call for each would cost as much as copying some KiB, and the interpreter lock would change hands at each: between any
two tensors' bytes stand about 128 bytes of the zip file, and optimizers keep a number for each parameter. Linux copies
many stretches at once from one process to another, which may be the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

#: As many as the system takes at once.
_AT_ONCE = 1024
#: So few stretches of a piece are copied one by one, each by a call that is faster than the one for many.
_FEW = 24

_Integers = np.ndarray[Any, np.dtype[np.int64]]


class Copies:
    """All copies into one buffer.

    Attributes:
        calls: How many calls they take.
    """

    def __init__(
        self, target: ctypes.Array[Any], offsets: _Integers, lengths: _Integers, addresses: _Integers, *, piece: int
    ) -> None:
        """Cuts stretches up.

        Args:
            target: The buffer, which is not kept alive.
            offsets: Where in it the bytes of each stretch belong; none overlap.
            lengths: How many there are.
            addresses: Where they lie.
            piece: How many bytes of the buffer are filled at once.
        """
        order = np.argsort(offsets, kind="stable")
        order = order[lengths[order] > 0]
        offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
        ends, first = offsets + lengths, offsets // piece
        cuts = (ends - 1) // piece - first + 1
        # A row is what a stretch has in a piece.
        rows = np.repeat(np.arange(len(offsets)), cuts)
        pieces = np.arange(len(rows)) - np.repeat(np.cumsum(cuts) - cuts - first, cuts)
        lows, highs = np.maximum(offsets[rows], pieces * piece), np.minimum(ends[rows], (pieces + 1) * piece)
        self._places = ctypes.addressof(target) + lows
        self._sources = np.stack((addresses[rows] + (lows - offsets[rows]), highs - lows), axis=1)
        # A batch of rows begins with a piece, or where there would be too many.
        begins = (np.arange(len(rows)) - np.searchsorted(pieces, pieces)) % _AT_ONCE == 0
        batches = np.append(np.flatnonzero(begins), len(rows))
        self._batches = batches.tolist()
        #: Which batch is the first of each piece.
        self._pieces = np.searchsorted(pieces[batches[:-1]], np.arange(-(-len(target) // piece) + 1)).tolist()
        # A run of a batch's rows follows without a gap in the buffer.
        runs = np.flatnonzero(begins | np.append(True, lows[1:] != highs[:-1])[: len(rows)])
        totals = np.append(0, np.cumsum(highs - lows))[np.append(runs, len(rows))]
        self._targets = np.stack((self._places[runs], np.diff(totals)), axis=1)
        self._runs = np.searchsorted(runs, batches).tolist()
        self._gather = gathering()
        single = np.diff(batches) <= (_FEW if self._gather is not None else _AT_ONCE)
        alone = np.flatnonzero(np.repeat(single, np.diff(batches)))
        self._alone = self._columns(alone)
        #: Where the rows of each batch begin among those that are copied one by one.
        self._firsts = np.searchsorted(alone, batches).tolist()
        self.calls = len(alone) + int(np.count_nonzero(~single))

    def copy(self, piece: int, away: int = 0) -> None:
        """Copies what belongs in a piece, by its number, to ``away`` bytes beyond the buffer's own."""
        for batch in range(*self._pieces[piece : piece + 2]):
            start, end = self._firsts[batch : batch + 2]
            if start < end:
                _copy_each(*(column[start:end] for column in self._alone), away=away)
            elif not self._copy_batch(batch, away):
                _copy_each(*self._columns(slice(*self._batches[batch : batch + 2])), away=away)

    def _copy_batch(self, batch: int, away: int) -> bool:
        targets = self._targets[slice(*self._runs[batch : batch + 2])]
        sources = self._sources[slice(*self._batches[batch : batch + 2])]
        return self._gather is not None and self._gather(np.add(targets, (away, 0)), sources)

    def _columns(self, rows: Any) -> tuple[list[int], list[int], list[int]]:
        return self._places[rows].tolist(), self._sources[rows, 0].tolist(), self._sources[rows, 1].tolist()


def _copy_each(targets: list[int], sources: list[int], lengths: list[int], *, away: int) -> None:
    if away:
        targets = [target + away for target in targets]
    # No line of Python for each, of which there may be thousands. A call releases the interpreter lock, unlike a copy
    # between memoryviews.
    deque(map(ctypes.memmove, targets, sources, lengths), 0)


@functools.cache
def gathering() -> Callable[[_Integers, _Integers], bool] | None:
    """What copies many stretches of this process' memory at once; None where the system has or allows no such call.

    It takes rows of an address and a length: where to, and where from, both as many bytes in all. It tells whether all
    of them were copied.
    """
    try:
        write = ctypes.CDLL(None).process_vm_writev
    except (AttributeError, OSError, TypeError):
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    write.argtypes, write.restype = (ctypes.c_int, pointer, count, pointer, count, count), ctypes.c_ssize_t

    def gather(targets: _Integers, sources: _Integers) -> bool:
        done = write(os.getpid(), sources.ctypes.data, len(sources), targets.ctypes.data, len(targets), 0)
        return bool(done == sources[:, 1].sum())

    # A container's rules may forbid it.
    tried = np.arange(2, dtype=np.int64)
    rows = np.array([[tried.ctypes.data, 8], [tried.ctypes.data + 8, 8]])
    return gather if gather(rows[:1], rows[1:]) and tried[0] == 1 else None
