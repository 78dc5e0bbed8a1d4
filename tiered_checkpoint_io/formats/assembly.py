"""The pickle that ``torch.save`` would write, put together from a skeleton and what its tensors are.

What a pickle refers to by number, its memo, is numbered anew from front to end: objects in the skeleton's order, and
those that only a tensor's own pickle has (its tuples, its storage's key). Of units the outcome is kept as a *template*:
where the unit, its tensors and what it refers to are as they were, only the numbers move.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tiered_checkpoint_io.formats.alike import Alike, alike
from tiered_checkpoint_io.formats.opcodes import (
    BINGET,
    BINPUT,
    CALLED,
    LONG_BINGET,
    LONG_BINPUT,
    after,
    get,
    integer,
    put,
    string_of,
    text,
)
from tiered_checkpoint_io.formats.skeleton import (
    CLASS_OF,
    CPU,
    ORDERED_DICT,
    REBUILD,
    SEEDS,
    STORAGE,
    TENSOR,
    DoubtError,
    Piece,
    Skeleton,
    Tensors,
    fill_storages,
)

#: Tokens of storages' keys are below zero, those of objects in the skeleton are the skeleton's numbers.
_KEYS = -1


@dataclass(frozen=True, slots=True)
class Template:
    """The pickle of a unit, and what it holds for.

    Attributes:
        data: The pickle's stretch.
        start: The first number that it gives out.
        count: How many it gives out.
        fields: Where numbers stand in it, and which.
        external: What it refers to that was numbered before, by token.
        early: Strings of its own that were numbered before.
        strings: How these are written.
        seeds: The seeds that it numbers, by what they are more than ``start``.
        memo: The same of its own objects, in the skeleton's order; -1 for those in ``early``.
        keys: The same of the keys of storages that it has first.
        facts: See :meth:`Tensors.facts`.
        fills: Whether each tensor takes up the whole of a storage.
        pattern: The number of each tensor's storage.
        alike: What tells whether tensors are as the facts say; None where each has to be asked.
    """

    data: bytes
    start: int
    count: int
    fields: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    external: dict[int, int]
    early: frozenset[int]
    strings: dict[int, bytes]
    seeds: dict[int, int]
    memo: array[int]
    keys: array[int]
    facts: list[list[Any]]
    fills: bool
    pattern: list[int]
    alike: Alike | None

    def holds(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether tensors are as the facts say, but for their offsets and storages."""
        return self.alike is not None and len(tensors) == len(self.pattern) and self.alike.holds(tensors)

    def moved(self, start: int, external: dict[int, int]) -> bytes:
        """The same stretch where it begins with another number, or refers to others; these are as long as before."""
        if start == self.start and external == self.external:
            return self.data
        places, numbers = self.fields
        new = np.where(numbers >= self.start, numbers + (start - self.start), numbers)
        for token, old in self.external.items():
            new[numbers == old] = external[token]
        data = np.frombuffer(self.data, np.uint8).copy()
        short = numbers < 256
        data[places[short]] = new[short]
        data[places[~short][:, None] + np.arange(4)] = new[~short].astype("<u4").view(np.uint8).reshape(-1, 4)
        return data.tobytes()


@dataclass(slots=True)
class _Stretch:
    """What is being written: the rest, or a unit for its template."""

    start: int
    out: list[bytes] = field(default_factory=list)
    length: int = 0
    places: list[int] = field(default_factory=list)
    numbered: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    external: dict[int, int] = field(default_factory=dict)
    copied: list[tuple[int, int, int]] = field(default_factory=list)

    def copy(self, data: bytes, begin: int, end: int) -> None:
        """Writes a stretch of a piece as it is, and notes where."""
        if begin < end:
            self.copied.append((begin, end, self.length))
            self.out.append(data[begin:end])
            self.length += end - begin


@dataclass(frozen=True, slots=True)
class _Placed:
    unit: Piece
    template: Template
    start: int
    keys_from: int


class Assembly:
    """One pickle, put together.

    Attributes:
        data: The pickle.
        order: The number of the first tensor of each storage, in the order of the file's records.
        templates: Those of all units, by the units' bytes.
        copied: Which stretches ``[begin, end)`` of the rest were copied to where, after what begins a pickle.
    """

    def __init__(
        self, skeleton: Skeleton, tensors: Tensors, known: dict[bytes, Template], *, learn: bool = False
    ) -> None:
        """Puts it together.

        Args:
            skeleton: The state's structure.
            tensors: Its tensors.
            known: Templates of earlier saves.
            learn: Whether to make templates of units with tensors that have none: most of the time that it takes.

        Raises:
            DoubtError: The pickle has something that is not provided for, or a template is wanting.
        """
        self.order: list[int] = []
        self.templates: dict[bytes, Template] = {}
        self._tensors, self._known, self._learn = tensors, known, learn
        self._all = skeleton.tensors
        self._units = {unit.first: unit for unit in skeleton.units if unit.end > unit.first}
        self._storages: dict[int, int] = {}
        self._placed: list[_Placed] = []
        self._early: dict[int, int] = {}
        self._strings: dict[int, bytes] = {}
        self._count = 0
        rest = _Stretch(0)
        self._rest = rest
        self._write(skeleton.rest, rest)
        self.data = b"".join((b"\x80\x02", *rest.out, b"."))
        self.copied = rest.copied
        if len(self._placed) != len(self._units):
            raise DoubtError("a unit is not part of the rest")

    # ------------------------------------------------------------------------------------- writing
    def _write(self, piece: Piece, to: _Stretch) -> None:
        data, end, tensors = piece.data, len(piece.data), iter(piece.tensors)
        done = at = before = 0
        while at < end:
            code, begin = data[at], at
            at = after(data, at)
            if code in (BINPUT, LONG_BINPUT):
                token = int.from_bytes(data[begin + 1 : at], "little")
                number = self._early.get(token)
                if number is None:
                    to.copy(data, done, begin)
                    self._number(token, to)
                else:
                    # It has been written already, where another piece refers to it.
                    to.copy(data, done, before)
                    self._refer(number, token, to)
                done = at
            elif code in (BINGET, LONG_BINGET):
                to.copy(data, done, begin)
                token = int.from_bytes(data[begin + 1 : at], "little")
                if token == TENSOR:
                    self._write_tensor(next(tensors), to)
                    at += len(CALLED)
                else:
                    self._use(token, to)
                done = at
            before = begin
        to.copy(data, done, end)

    def _copy(self, to: _Stretch, data: bytes) -> None:
        if data:
            to.out.append(data)
            to.length += len(data)

    def _next(self, to: _Stretch) -> int:
        number = self._count
        self._count += 1
        to.places.append(to.length + 1)
        to.numbered.append(number)
        self._copy(to, put(number))
        return number

    def _number(self, token: int, to: _Stretch) -> None:
        to.numbers[token] = self._next(to)

    def _refer(self, number: int, token: int, to: _Stretch) -> None:
        if number < to.start:
            to.external[token] = number
        to.places.append(to.length + 1)
        to.numbered.append(number)
        self._copy(to, get(number))

    def _use(self, token: int, to: _Stretch) -> None:
        """Writes a reference to an object; or the object, where it has not been met yet."""
        number = to.numbers.get(token)
        if number is None:
            number = self._lookup(token)
        if number is not None:
            self._refer(number, token, to)
        elif 0 <= token < len(SEEDS):
            self._copy(to, SEEDS[token][1])
            self._number(token, to)
        elif to is not self._rest or token < 0:
            raise DoubtError("a unit refers to what comes later")
        elif token in self._units:
            self._place(self._units[token])
        else:
            self._copy(to, self._definition(token))
            self._number(token, to)
            self._early[token] = to.numbers[token]

    def _lookup(self, token: int) -> int | None:
        number = self._rest.numbers.get(token)
        if number is not None:
            return number
        for placed in self._placed:
            unit, template = placed.unit, placed.template
            numbers, first = (template.memo, unit.first) if token >= 0 else (template.keys, placed.keys_from)
            index = token - first if token >= 0 else _KEYS - token - first
            if 0 <= index < len(numbers) and numbers[index] >= 0:
                return placed.start + numbers[index]
        return None

    def _definition(self, token: int) -> bytes:
        """How the string is written that a unit has, and an earlier piece refers to."""
        for unit in self._units.values():
            if unit.first <= token < unit.end:
                template = self._known.get(unit.data)
                known = template.strings.get(token) if template is not None else None
                self._strings[token] = string_of(unit.data, token) if known is None else known
                return self._strings[token]
        raise DoubtError("an object is met in several pieces")

    def _write_tensor(self, number: int, to: _Stretch) -> None:
        """Writes all of it but the number that it is given."""
        every = self._tensors
        dtype, size, device = every.dtypes[number], every.sizes[number], every.devices[number]
        key = self._storage(number)

        def seed(token: int) -> None:
            self._use(token, to)

        seed(REBUILD)
        self._copy(to, b"((")
        seed(STORAGE)
        seed(CLASS_OF[dtype])
        used = to.numbers.get(_KEYS - key)
        if used is None:
            used = self._lookup(_KEYS - key)
        if used is None:
            self._copy(to, text(str(key)))
            self._number(_KEYS - key, to)
        else:
            self._refer(used, _KEYS - key, to)
        if device.type == "cpu":
            seed(CPU)
        else:
            self._copy(to, text(str(device)))
            self._next(to)
        self._copy(to, integer(size // dtype.itemsize) + b"t")
        self._next(to)
        self._copy(to, b"Q" + integer(every.offsets[number]))
        self._write_tuple(every.shapes[number], to)
        self._write_tuple(every.strides[number], to)
        self._copy(to, b"\x88" if every.grads[number] else b"\x89")
        seed(ORDERED_DICT)
        self._copy(to, b")R")
        self._next(to)
        self._copy(to, b"t")
        self._next(to)
        self._copy(to, b"R")

    def _write_tuple(self, values: Sequence[int], to: _Stretch) -> None:
        if not values:
            self._copy(to, b")")
            return
        size = len(values)
        begin, end = (b"", b"%c" % (0x84 + size)) if size <= 3 else (b"(", b"t")
        self._copy(to, begin + b"".join(map(integer, values)) + end)
        self._next(to)

    def _storage(self, number: int) -> int:
        identity = self._tensors.identities[number]
        key = self._storages.get(identity)
        if key is None:
            key = self._storages[identity] = len(self.order)
            self.order.append(number)
        return key

    def _storages_of(self, numbers: range) -> list[int]:
        if self._learn or not self._tensors.separate:
            return list(map(self._storage, numbers))
        # None of them is asked for again.
        keys = range(len(self.order), len(self.order) + len(numbers))
        self.order += numbers
        return list(keys)

    # --------------------------------------------------------------------------------------- units
    def _place(self, unit: Piece) -> None:
        start, keys_from = self._count, len(self.order)
        pattern = self._storages_of(unit.tensors)
        facts = self._tensors.facts(unit.tensors)
        early = frozenset(token for token in self._early if unit.first <= token < unit.end)
        template = self._known.get(unit.data)
        external: dict[int, int] | None = None
        if template is not None and (template.facts, template.pattern, template.early) == (facts, pattern, early):
            external = self._fits(template, start)
        if template is None or external is None:
            if unit.tensors and not self._learn:
                raise DoubtError("a unit is not that of an earlier save")
            template = self._template(unit, start, keys_from, pattern, facts, early)
            external = template.external
        self._copy(self._rest, template.moved(start, external))
        self._count = start + template.count
        self._rest.numbers |= {token: start + more for token, more in template.seeds.items()}
        self._placed.append(_Placed(unit, template, start, keys_from))
        self.templates[unit.data] = template

    def _fits(self, template: Template, start: int) -> dict[int, int] | None:
        """What a template's external tokens are numbered now; None where it does not hold."""
        external: dict[int, int] = {}
        for token, old in template.external.items():
            number = self._lookup(token)
            if number is None or (number < 256) != (old < 256):
                return None
            external[token] = number
        if any(self._lookup(token) is not None for token in template.seeds):
            return None
        same_length = start == template.start or min(start, template.start) >= 256
        return external if same_length else None

    def _template(
        self, unit: Piece, start: int, keys_from: int, pattern: list[int], facts: list[list[Any]], early: frozenset[int]
    ) -> Template:
        to = _Stretch(start)
        self._write(unit, to)
        missing = start - 1
        numbers = to.numbers
        return Template(
            b"".join(to.out),
            start,
            self._count - start,
            (np.array(to.places, np.uint32), np.array(to.numbered, np.int32)),
            to.external,
            early,
            {token: self._strings[token] for token in early},
            {token: numbers[token] - start for token in range(len(SEEDS)) if token in numbers},
            array("q", [numbers.get(token, missing) - start for token in range(unit.first, unit.end)]),
            array("q", [numbers[_KEYS - key] - start for key in range(keys_from, len(self.order))]),
            facts,
            fill_storages(facts),
            pattern,
            alike([self._all[number] for number in unit.tensors]),
        )
