"""The pickle of a state whose structure is that of the save before: only the values in its rest are put in anew."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from tiered_checkpoint_io.formats.assembly import Assembly
from tiered_checkpoint_io.formats.opcodes import values_in
from tiered_checkpoint_io.formats.records import Records
from tiered_checkpoint_io.formats.skeleton import Skeleton, Tensors

#: What begins a pickle.
_BEGIN = 2


class Repeat:
    """One assembled pickle, and what it holds for; those made from it are as long.

    Attributes:
        order: See :class:`Assembly`.
        records: The file around it.
        move: By how much what comes after the pickle has moved; so it has for all pickles that are made here.
    """

    def __init__(self, skeleton: Skeleton, tensors: Tensors, assembly: Assembly, records: Records) -> None:
        self.order, self.records = assembly.order, records
        self.move = records.moved_by(assembly.data)
        self._units, self._rest = skeleton.units, skeleton.rest
        self._tensors = _facts_of(tensors)
        self._data, self._copied = assembly.data, assembly.copied

    def pickle_of(self, skeleton: Skeleton, tensors: Tensors) -> bytes | None:
        """The pickle of another state; None where more than the values of the rest has changed."""
        rest, before = skeleton.rest, self._rest
        same = (rest.first, rest.tensors) == (before.first, before.tensors)
        if not same or len(rest.data) != len(before.data) or skeleton.units != self._units:
            return None
        if _facts_of(tensors) != self._tensors:
            return None
        new = np.frombuffer(rest.data, np.uint8)
        changed = np.flatnonzero(new != np.frombuffer(before.data, np.uint8))
        places = self._places[changed]
        # What is not a value decides on what follows it.
        if (places < 0).any():
            return None
        data = np.frombuffer(self._data, np.uint8).copy()
        data[places] = new[changed]
        return data.tobytes()

    @cached_property
    def _places(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where in the pickle each byte of the rest stands that is a value's; below zero for all others."""
        copied = np.full(len(self._rest.data), -1, np.int64)
        for begin, end, to in self._copied:
            copied[begin:end] = np.arange(to, to + end - begin) + _BEGIN
        places = np.full_like(copied, -1)
        for begin, end in values_in(self._rest.data):
            places[begin:end] = copied[begin:end]
        return places


def _facts_of(tensors: Tensors) -> tuple[list[object], ...]:
    """All that is written of tensors, and which of them share storages."""
    number: dict[int, int] = {}
    shared = [] if tensors.separate else [number.setdefault(each, len(number)) for each in tensors.identities]
    return (*tensors.facts(range(len(tensors.sizes))), shared)
