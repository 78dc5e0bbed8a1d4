"""Blocks of tensors, copied from where they are stored to files that are cut in another way."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

#: Bytes that are read and written at once.
WINDOW = 8 << 20

#: Reads bytes of a block of elements, as if they lay contiguous: from where on, and how many.
Read = Callable[[int, int], memoryview]


class Box(NamedTuple):
    """A block of a tensor: where it begins in each dimension, and how many elements it has there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """What two blocks of one tensor have in common; None where that is nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        ends = ((one + a, two + b) for one, a, two, b in zip(*self, *other, strict=True))
        sizes = tuple(min(end) - start for end, start in zip(ends, low, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where in an array of ``outer`` it lies."""
        starts = (low - base for low, base in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


def whole(size: Sequence[int]) -> Box:
    """The block that is the whole tensor."""
    return Box((0,) * len(size), tuple(size))


class TargetBlock(NamedTuple):
    """Where a block of a tensor belongs: contiguous, from byte ``base`` of a mapped file on."""

    box: Box
    mapping: mmap.mmap
    base: int


def pour(box: Box, itemsize: int, read: Read, targets: Sequence[TargetBlock]) -> None:
    """Copies what a stored block has of each target, a window at a time; reads no window that none needs.

    Args:
        box: The block that is stored.
        itemsize: Bytes of an element.
        read: Reads its bytes.
        targets: Where blocks of the same tensor belong. No two threads may write the same bytes.
    """
    arrays = [
        np.frombuffer(target.mapping, np.uint8, target.box.numel * itemsize, target.base).reshape(
            *target.box.sizes, itemsize
        )
        for target in targets
    ]
    for start, piece in _pieces(box, itemsize):
        data = None
        for target, array in zip(targets, arrays, strict=True):
            common = piece.common(target.box)
            if common is None:
                continue
            if data is None:
                data = np.frombuffer(read(start, piece.numel * itemsize), np.uint8).reshape(*piece.sizes, itemsize)
            array[common.within(target.box)] = data[common.within(piece)]
            # Written pages count as the process's own for no longer than that.
            target.mapping.madvise(mmap.MADV_DONTNEED)


def _pieces(box: Box, itemsize: int, start: int = 0) -> Iterator[tuple[int, Box]]:
    """A block as smaller ones of at most a window, each contiguous, and where it begins among the block's bytes."""
    nbytes = box.numel * itemsize
    if nbytes <= WINDOW or box.numel < 2:
        yield start, box
        return
    # All dimensions before it have one element: what is cut here stays contiguous.
    cut = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    row = nbytes // box.sizes[cut]
    step = max(1, WINDOW // row)
    for first in range(0, box.sizes[cut], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[cut] += first
        sizes[cut] = min(step, sizes[cut] - first)
        yield from _pieces(Box(tuple(offsets), tuple(sizes)), itemsize, start + first * row)
