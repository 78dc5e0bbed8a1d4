"""A state pickled with a mark in the place of each tensor: cheap to make, and equal where the structure is.

The *rest* is the pickle of the whole state. Large collections in it (a ``state_dict``, the state of an optimizer) are
pickled beforehand, by the same pickler, as *units*: the rest refers to them by the pickler's memo, as to all that it
has met. A unit whose bytes are those of an earlier save has the structure of then, keys and shared objects included.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, getitem
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch

#: Tensors that are looked at together.
_AT_ONCE = 256
#: A collection of at least so many items is a unit.
_LARGE = 32
_COLLECTIONS = frozenset({dict, OrderedDict, list, tuple})
_PLAIN = frozenset({int, float, str, bool, bytes, complex})

_STORAGE_CLASSES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


#: What pickled tensors refer to and a state may hold as well, and how each is written where it is met first. They stand
#: in the pickler's memo from the start, so that every use of them shows as a reference.
SEEDS: list[tuple[Any, bytes]] = [
    (torch._utils._rebuild_tensor_v2, _global("torch._utils", "_rebuild_tensor_v2")),
    (OrderedDict, _global("collections", "OrderedDict")),
    (sys.intern("storage"), b"X\x07\0\0\0storage"),
    (sys.intern("cpu"), b"X\x03\0\0\0cpu"),
    *((each, _global("torch", each.__name__)) for each in _STORAGE_CLASSES.values()),
]
REBUILD, ORDERED_DICT, STORAGE, CPU = range(4)
#: The number of each type's storage class in :data:`SEEDS`.
CLASS_OF = {dtype: 4 + index for index, dtype in enumerate(_STORAGE_CLASSES)}


def tensor_here() -> None:
    """What tensors are pickled as."""


#: The number that this has in the pickler's memo from the start.
TENSOR = len(SEEDS)
#: What begins a pickle.
_BEGIN = pickle.PROTO + b"\x02"
_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
#: The pickler's memo from the start.
_MEMO = {id(value): (number, value) for number, value in enumerate([*(value for value, _ in SEEDS), tensor_here])}


class _Pickler(pickle.Pickler):
    """Takes attributes."""


class DoubtError(Exception):
    """A state may be pickled in another way than is assumed here, so ``torch.save`` has to do it."""


class Piece(NamedTuple):
    """A unit, or the rest.

    Attributes:
        data: Its pickle, without what begins and ends one; for a tensor, a call of :func:`tensor_here`.
        first: The first number that the pickler's memo gave to an object of it.
        end: Of a unit, the number after the last one.
        tensors: The numbers of the tensors that it has first.
    """

    data: bytes
    first: int
    tensors: range
    end: int = 0


class Skeleton(NamedTuple):
    """A state's structure, and its tensors by their numbers.

    Attributes:
        units: Its large collections.
        rest: All of it, which refers to them.
        tensors: All, in the order in which they are met.
        paths: The keys that lead to each unit.
    """

    units: tuple[Piece, ...]
    rest: Piece
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[tuple[Any, ...], ...]


def scan(state: Any, paths: Sequence[tuple[Any, ...]] | None = None) -> Skeleton:
    """Takes a state's structure apart.

    Args:
        state: The state.
        paths: The keys that lead to its units, in their order; by default these are looked for.

    Raises:
        DoubtError: It holds a bare storage.
        Exception: Whatever pickling raises; or nothing is there where a path leads.
    """
    tensors: list[torch.Tensor] = []
    # Asked of thousands of tensors: what is the same for all is looked up once.
    plain, add, mark = torch.Tensor, tensors.append, (tensor_here, ())

    def reduced(value: Any) -> Any:
        # Asked of all but plain values and collections, and once of each object.
        if type(value) is plain:
            add(value)
            return mark
        if isinstance(value, _STORAGES):
            raise DoubtError("a storage stands for itself")
        return NotImplemented

    file = io.BytesIO()
    pickler: Any = _Pickler(file, protocol=2)
    pickler.memo = _MEMO
    pickler.reducer_override = reduced

    def dumped(value: object) -> bytes:
        file.seek(0)
        file.truncate()
        pickler.dump(value)
        return file.getvalue()[len(_BEGIN) : -1]

    # The number that the memo gives to a new object tells how many there are. They must live as long as the pickler.
    markers: list[list[Any]] = []

    def position() -> int:
        markers.append([])
        return int.from_bytes(dumped(markers[-1])[2:], "little")

    if paths is None:
        units = dict(_units(state, (), set()))
    else:
        units = {path: functools.reduce(getitem, path, state) for path in paths}
    pieces, begin, first = list[Piece](), len(_MEMO), 0
    for value in units.values():
        data, end = dumped(value), position()
        pieces.append(Piece(data, begin, range(first, len(tensors)), end))
        begin, first = end + 1, len(tensors)
    rest = Piece(dumped(state), begin, range(first, len(tensors)))
    return Skeleton(tuple(pieces), rest, tuple(tensors), tuple(units))


def rebuilt(skeleton: Skeleton) -> Any:
    """A state like the one that was taken apart, then; its tensors are the same ones.

    Raises:
        Exception: Whatever unpickling raises.
    """
    # What stands in the memo from the start is put there: a memo that is set is not the one that is used.
    known = [*(data for _, data in SEEDS), b"K\0Q"]
    memo = [data + pickle.BINPUT + bytes([number]) for number, data in enumerate(known)]
    pieces = [piece + pickle.POP for piece in (*memo, *(unit.data for unit in skeleton.units))]
    unpickler: Any = pickle.Unpickler(io.BytesIO(b"".join((_BEGIN, *pieces, skeleton.rest.data, pickle.STOP))))
    tensors = iter(skeleton.tensors)
    unpickler.persistent_load = lambda _: tensors.__next__
    return unpickler.load()


def apart(skeleton: Skeleton, others: Sequence[torch.Tensor], copies: Mapping[int, torch.UntypedStorage]) -> Skeleton:
    """The same with tensors of its own in place of some, which may be changed in any way then.

    Args:
        skeleton: A state's structure.
        others: Some of its tensors.
        copies: Copies of the storages that these lie in, by the storages' identity.

    Raises:
        DoubtError: One of them is pickled in another way than most.
    """
    facts = Tensors(tuple(others))
    own: dict[int, torch.Tensor] = {}
    for number, each in enumerate(others):
        made = torch.empty(0, dtype=facts.dtypes[number], device=facts.devices[number])
        copied: Any = copies[facts.identities[number]]
        made.set_(copied, facts.offsets[number], facts.shapes[number], facts.strides[number])
        own[id(each)] = made.requires_grad_(facts.grads[number])
    return skeleton._replace(tensors=tuple([own.get(id(each), each) for each in skeleton.tensors]))


def _units(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The large collections within plain collections, in the order in which a pickler meets them; and their paths."""
    kind = type(value)
    if kind not in _COLLECTIONS or id(value) in seen:
        return
    seen.add(id(value))
    is_dict = kind in (dict, OrderedDict)
    children = list(value.values()) if is_dict else value
    if len(children) >= _LARGE and kind is not tuple and not _is_mixed(children):
        yield path, value
        return
    for key, child in zip(value if is_dict else range(len(value)), children, strict=True):
        if type(child) in _COLLECTIONS:
            yield from _units(child, (*path, key), seen)


def _is_mixed(children: Any) -> bool:
    """Whether numbers or names stand beside collections or tensors: they change at every save."""
    kinds = set(map(type, children))
    if kinds & _PLAIN:
        return not kinds <= _PLAIN
    first = next(iter(children), None)
    return type(first) is dict and bool(first) and _is_mixed(first.values())


# ------------------------------------------------------------------------------------------ tensors
#: Asked of each tensor; the last one is not in all releases of torch.
_ODD = [getattr(torch.Tensor, name) for name in ("is_conj", "is_neg", "has_names") if hasattr(torch.Tensor, name)]

_offset = cast("Callable[[torch.Tensor], int]", torch.Tensor.storage_offset)


class Known(Protocol):
    """What some tensors were."""

    @property
    def facts(self) -> list[list[Any]]:
        """See :meth:`Tensors.facts`."""

    @property
    def fills(self) -> bool:
        """Whether each took up the whole of a storage."""

    def holds(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether others are the same in all that the facts say, but for their offsets and storages."""


#: Where in the facts these stand.
_OFFSETS, _GRADS, _SIZES = 4, 5, 6


def fill_storages(facts: list[list[Any]]) -> bool:
    """Whether each of the tensors takes up the whole of a storage."""
    dtypes, _, shapes, strides, offsets, _, sizes = facts

    def extent(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> int:
        return dtype.itemsize * (1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True)))

    return not any(offsets) and all(map(all, shapes)) and sizes == list(map(extent, dtypes, shapes, strides))


class Tensors:
    """What the pickle and the file say of each tensor, by its number; and its storage.

    Attributes:
        forms: What decides on how a tensor is written, but for numbers; of those that are not like known ones.
        addresses: Where the storages begin.
        separate: Whether each is known to have a storage of its own.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], known: Iterable[tuple[range, Known | None]] = ()) -> None:
        """Looks at all of them.

        Args:
            tensors: All, by their numbers.
            known: What some were at an earlier save, in the order of their numbers.

        Raises:
            DoubtError: One is pickled in another way than most.
        """
        self.dtypes: list[torch.dtype] = []
        self.devices: list[torch.device] = []
        self.shapes: list[torch.Size] = []
        self.strides: list[tuple[int, ...]] = []
        self.offsets: list[int] = []
        self.grads: list[bool] = []
        self.storages: list[torch.UntypedStorage] = []
        self._addresses: list[int] = []
        self.sizes: list[int] = []
        self.forms: set[tuple[torch.dtype, torch.device, bool]] = set()
        self.separate = False
        done = 0
        for numbers, what in known:
            if what is None or not what.holds(tensors[numbers.start : numbers.stop]):
                continue
            self._look_at(tensors[done : numbers.start])
            # Of those that are as they were, only what Python alone can tell.
            for field, value in zip((self.dtypes, self.devices, self.shapes, self.strides), what.facts, strict=False):
                cast("list[Any]", field).extend(value)
            grads, offsets, sizes = (what.facts[field] for field in (_GRADS, _OFFSETS, _SIZES))
            self.grads += grads
            some = tensors[numbers.start : numbers.stop]
            # There are hooks on tensors with gradients alone.
            self._ask(some, hooks=True in grads)
            # What takes up a storage from end to end, begins at its start.
            whole = what.fills and self.sizes[numbers.start :] == sizes
            self.offsets += offsets if whole else map(_offset, some)
            done = numbers.stop
        self._look_at(tensors[done:])
        self.addresses = np.array(self._addresses, np.int64)
        self._check_memory()

    @functools.cached_property
    def identities(self) -> list[int]:
        """What tells the storages apart."""
        return list(map(attrgetter("_cdata"), self.storages))

    def _look_at(self, tensors: tuple[torch.Tensor, ...]) -> None:
        for start in range(0, len(tensors), _AT_ONCE):
            # Few at once, so that they are still in the core's cache when the next is asked of them.
            some = tensors[start : start + _AT_ONCE]
            if set(map(attrgetter("layout"), some)) != {torch.strided} or any(
                chain.from_iterable(map(method, some) for method in _ODD)
            ):
                raise DoubtError("a tensor is of an uncommon kind")
            dtypes, devices = list(map(attrgetter("dtype"), some)), list(map(attrgetter("device"), some))
            grads = list(map(attrgetter("requires_grad"), some))
            self.forms.update(zip(dtypes, devices, grads, strict=True))
            self.dtypes += dtypes
            self.devices += devices
            self.grads += grads
            self.shapes += map(attrgetter("shape"), some)
            self.strides += map(torch.Tensor.stride, some)
            self.offsets += map(_offset, some)
            self._ask(some)

    def _ask(self, tensors: tuple[torch.Tensor, ...], *, hooks: bool = True) -> None:
        """What nothing but the tensor itself can tell, and its storage."""
        for start in range(0, len(tensors), _AT_ONCE):
            some = tensors[start : start + _AT_ONCE]
            if any(map(attrgetter("__dict__"), some)) or (
                hooks and set(map(attrgetter("_backward_hooks"), some)) != {None}
            ):
                raise DoubtError("a tensor is of an uncommon kind")
            storages = list(map(torch.Tensor.untyped_storage, some))
            self._addresses += map(torch.UntypedStorage.data_ptr, storages)
            self.sizes += map(torch.UntypedStorage.nbytes, storages)
            self.storages += storages

    def _check_memory(self) -> None:
        kinds = {device.type for _, device, _ in self.forms}
        if {dtype for dtype, _, _ in self.forms} - CLASS_OF.keys() or kinds - {"cpu", "cuda"}:
            raise DoubtError("a tensor is of an uncommon kind")
        if set(map(type, self.storages)) - {torch.UntypedStorage}:
            raise DoubtError("a storage is of an uncommon kind")
        # Sets of addresses, which end in the same bits, take many times as long.
        ordered = np.sort(self.addresses)
        self.separate = not (ordered[1:] == ordered[:-1]).any()
        if self.separate:
            return
        addresses = set(self._addresses)
        identities = set(self.identities)
        nowhere = {identity for identity, at in zip(self.identities, self._addresses, strict=True) if not at}
        shared = len(addresses - {0}) != len(identities - nowhere)
        # Of memory that is met as two types, torch.save makes an error.
        mixed = len(identities) < len(self.dtypes) and len(set(zip(self.identities, self.dtypes, strict=True))) > len(
            identities
        )
        if shared or mixed:
            raise DoubtError("memory is shared in an uncommon way")

    def facts(self, numbers: range) -> list[list[Any]]:
        """All that is written of some of them, but for which ones share a storage."""
        part = slice(numbers.start, numbers.stop)
        fields = (self.dtypes, self.devices, self.shapes, self.strides, self.offsets, self.grads, self.sizes)
        return [field[part] for field in fields]
