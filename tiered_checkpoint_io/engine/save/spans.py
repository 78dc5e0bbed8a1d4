"""Spans of memory: whether the tensors that only the optimizers change hold every byte that a save needs.

Addresses of the CPU and of CUDA devices are of one space, in which no two allocations meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

#: Integers, one for each span.
Integers = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Found = torch.Tensor | torch.UntypedStorage
_T = TypeVar("_T")
#: Tensors that are whole on each rank.
WHOLE = {torch.Tensor, torch.nn.Parameter}
#: Tensors that are looked at together.
_AT_ONCE = 256


class Spans:
    """A set of bytes, from spans that may meet and overlap."""

    def __init__(self, begins: Integers, ends: Integers) -> None:
        """Merges the spans."""
        order = np.argsort(begins)
        begins, reach = begins[order], np.maximum.accumulate(ends[order])
        # No span before a gap reaches the next.
        gaps = np.flatnonzero(begins[1:] > reach[:-1])
        self._begins = begins[np.concatenate(([0], gaps + 1))] if len(begins) else begins
        self._ends = reach[np.concatenate((gaps, [len(begins) - 1]))] if len(begins) else reach

    @property
    def size(self) -> int:
        """The number of the bytes."""
        return int((self._ends - self._begins).sum())

    def cover(self, begins: Integers, ends: Integers) -> Mask:
        """Returns for each given span whether the set has all its bytes; False for one that begins outside."""
        at = np.searchsorted(self._begins, begins, "right") - 1
        return (at >= 0) & (ends <= self._ends[at]) if len(self._ends) else at >= 0

    def meet(self, begins: Integers, ends: Integers) -> Mask:
        """Returns for each given span whether the set has any of its bytes."""
        at = np.searchsorted(self._begins, ends) - 1
        return (at >= 0) & (begins < self._ends[at]) if len(self._ends) else at >= 0


def ends_of(tensors: Sequence[torch.Tensor], begins: Integers) -> tuple[Integers, Integers, list[int]]:
    """Returns the ends of tensors, their sizes, and the numbers of the tensors with gaps between their elements.

    Args:
        tensors: Tensors of any shape.
        begins: Their addresses; 0 for one that has no memory, which is not looked at.
    """
    sizes, is_contiguous = list[int](), True
    for some in parts_of(tensors):
        sizes += map(attrgetter("nbytes"), some)
        is_contiguous = is_contiguous and all(map(torch.Tensor.is_contiguous, some))
    found = np.array(sizes, np.int64)
    ends, gaps = begins + found, list[int]()
    for number in () if is_contiguous else np.flatnonzero(begins).tolist():
        tensor = tensors[number]
        if not tensor.is_contiguous():
            ends[number] = begins[number] + extent(tensor)
            gaps += [number] if has_gaps(tensor) else []
    return ends, found, gaps


def spans_of(found: Sequence[Found]) -> tuple[Integers, Integers]:
    """Returns the starts and the ends of storages, given as storages or by their tensors."""
    begins, sizes = list[int](), list[int]()
    for some in parts_of(found):
        storages = [each.untyped_storage() if isinstance(each, torch.Tensor) else each for each in some]
        begins += map(torch.UntypedStorage.data_ptr, storages)
        sizes += map(torch.UntypedStorage.nbytes, storages)
    return (own := np.array(begins, np.int64)), own + np.array(sizes, np.int64)


def parts_here(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns this rank's shards of sharded tensors; other tensors unchanged."""
    if set(map(type, tensors)) <= WHOLE:
        return tensors
    return [getattr(each, "_local_tensor", each) for each in tensors]


def parts_of(found: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yields a few at once, so that facts about one are still in the core's cache at the next question."""
    return (found[start : start + _AT_ONCE] for start in range(0, len(found), _AT_ONCE))


def extent(tensor: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to the end of its last one."""
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.element_size() * (1 + last) if tensor.numel() else 0


def has_gaps(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor leaves out elements between its first and its last one, or may do so."""
    following = 1
    for step, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1 and step != following:
            return True
        following *= count
    return False
