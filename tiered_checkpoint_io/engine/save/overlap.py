"""Overlapped capture: tensors that only optimizers change are copied while the next forward and backward run.

The trainer names these tensors, and waits before an optimizer's step: see :meth:`Overlap.wait`. This wait is the
guarantee. All other bytes are copied before the save returns. After the copy, *witnesses* are compared: version
counters, addresses, and a few bytes of some tensors. They cannot prove that no tensor has changed. But if a witness
shows a change, this save fails, and later ones are eager: a checkpoint never mixes two steps.

*Spans* of memory show whether the tensors that only the optimizers change hold every byte that a save needs. Addresses
of the CPU and of CUDA devices are of one space, in which no two allocations meet.

A *snapshot* is a sharded state as it is now: the part that a capture leaves live, and the part that is copied at once.
DCP looks into mappings and lists, and pickles all else when it writes, which is later. So everything that training may
change in place by then is copied: each tensor that not only the optimizers hold, and each object that is not known to
be immutable.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar, cast

import numpy as np
import torch

from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.save.facts import say_eager
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging import beside_graphs
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.image import Image, StorageRegions

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

    A tensor that has no memory, and so begins at 0, is not looked at.
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


_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_MAPPINGS = (dict, OrderedDict)


class UncopiedError(Exception):
    """The save is to be eager: the state holds an object that can't be copied, or too many."""


class Snapshot:
    """A state, without copies of the tensors that only the optimizers change.

    Attributes:
        state: The same keys and values, in dictionaries and lists of its own.
        size: Bytes of its tensors, as far as this rank has them.
        copied_size: Bytes of the tensors that :meth:`copy` copies.
    """

    def __init__(
        self, state: dict[str, Any], find_others: Callable[[Sequence[torch.Tensor], Integers, Integers], list[int]]
    ) -> None:
        """Finds the tensors to copy; copies all other objects, or raises UncopiedError."""
        self._memo: dict[int, Any] = {}
        #: Place of each tensor in the copied state.
        self._places: list[tuple[Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self.state: dict[str, Any] = self._of(state)
        # Training waits for this: one question about all tensors is asked at once.
        here = parts_here(self._tensors)
        try:
            begins = np.array(list(map(torch.Tensor.data_ptr, here)), np.int64)
        except RuntimeError:
            # Some have no memory of their own.
            own = [each.data_ptr() if each.layout == torch.strided else 0 for each in here]
            begins = np.array(own, np.int64)
        ends, sizes, _ = ends_of(here, begins)
        self._others = find_others(here, begins, ends)
        self.size, self.copied_size = int(sizes.sum()), int(sizes[self._others].sum())

    def copy(self, kept: Sequence[torch.Tensor]) -> None:
        """Copies the tensors that not only the optimizers may change; raises as :func:`own_objects`."""
        for number, own in own_objects(self._tensors, kept).items():
            holder, key = self._places[number]
            holder[key] = own
        for number in self._others:
            holder, key = self._places[number]
            holder[key] = self._tensors[number].detach().clone()

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind not in _MAPPINGS and kind is not list:
            try:
                return copy.deepcopy(value, self._memo)
            except Exception as error:
                raise UncopiedError(f"a {kind.__module__}.{kind.__qualname__} can't be copied: {error}") from error
        made, items = (list(value), enumerate(value)) if kind is list else (kind(value), value.items())
        for key, each in items:
            if type(each) in _PLAIN:
                # The new container has it already.
                continue
            if isinstance(each, torch.Tensor):
                self._places.append((made, key))
                self._tensors.append(each)
            else:
                made[key] = self._of(each)
        return made


def own_objects(tensors: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Makes tensors over the same memory, by their numbers, because a holder of the first ones may replace it.

    Those that are ``kept`` are looked at after the copy, and stay as they are. So do sharded ones. Raises UncopiedError
    for a tensor with attributes, or hooks.
    """
    same = set(map(id, kept))
    numbers = [number for number, each in enumerate(tensors) if id(each) not in same and type(each) in WHOLE]
    some = [tensors[number] for number in numbers]
    if any(map(attrgetter("__dict__"), some)) or any(map(attrgetter("_backward_hooks"), some)):
        raise UncopiedError("a tensor has attributes or hooks, which may change")
    own = dict(zip(numbers, map(torch.Tensor.detach, some), strict=True))
    for number, each in zip(numbers, some, strict=True):
        if each.requires_grad:
            own[number].requires_grad_()
    return own


#: If set, each finished copy is compared with another copy that was made when the save began.
CHECK = "TIERED_CHECKPOINT_CHECK_STAGING"
_SLOW = "see whether the node is out of memory or of processor time; or use staging: eager"
#: A sparse tensor, for one, has no memory of its own.
_UNCOMMON = "it holds what can't be copied as it is: {}"
_TOO_MUCH = "much of the state is changed by others than the optimizers"
_NO_ROOM = "the GPU has no room for the copies that an overlapped save makes there"
#: If a larger share of a file belongs to more than the optimizers, an eager copy into a slot is faster.
_MOST_EAGER = 1 / 3
#: Number of tensors, and of bytes of each, that are compared with the capture.
_SAMPLES, _SAMPLE_BYTES = 4, 64
#: Delay of the copy, seconds, so that the save's caller returns before another thread needs the interpreter.
_HEAD_START_S = 0.005


class ChangedError(SaveError):
    """Error for a state that changed during its capture."""


@dataclass(slots=True)
class Overlapped:
    """One capture that continues after the save has returned.

    Attributes:
        tensors: Tensors that only the optimizers change; the save returns before their copy.
        sharded: The sharded tensors among those that the optimizers hold, which have version counters of their own.
        copies: For a full checkpoint, copies of all other storages, by the storage that was copied.
        copied: Set once the live state is no longer needed; ``wanted`` is set once training waits for that.
        size: Bytes of the state, of a sharded one.
        stall_s: Time for which the save's caller waited, seconds.
        made: Report that the caller got about the save.
        is_late: True if training continued before the copy was done.
    """

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    sharded: Sequence[torch.Tensor] = ()
    copies: Mapping[int, torch.UntypedStorage] = field(default_factory=dict)
    copied: threading.Event = field(default_factory=threading.Event)
    wanted: threading.Event = field(default_factory=threading.Event)
    size: int = 0
    stall_s: float = 0.0
    made: SaveReport | None = None
    is_late: bool = False
    is_checked: bool = False
    _versions: Sequence[int] = ()
    _samples: Sequence[bytes] = ()
    _expected: Sequence[torch.Tensor] = ()
    _ready: Sequence[Any] = ()

    def begin(self) -> None:
        """Notes the witnesses. All else has been copied by now, or its copy is queued on the GPU."""
        self._versions = self._count_versions()
        self._samples = list(_samples(self.tensors, self.addresses))
        if self.is_checked:
            self._expected = [_bytes_of(tensor).clone() for tensor in self.tensors]
        if cast("Any", torch.cuda).is_initialized():
            devices = {each for each in map(attrgetter("device"), self.tensors) if each.type == "cuda"}
            # All work that computes or copies the state has been queued by now.
            self._ready = [torch.cuda.current_stream(each).record_event() for each in devices]

    def _count_versions(self) -> list[int]:
        return list(map(attrgetter("_version"), (*self.tensors, *self.sharded)))

    def find_others(self, found: Sequence[Found], begins: Integers, ends: Integers) -> list[int]:
        """Returns the numbers of the saved tensors or storages to copy at once; a storage is copied whole, or not at
        all.

        ``begins`` has the start of each, 0 if it has no memory of its own, and ``ends`` its end. A storage is left in
        place if :attr:`tensors` hold every byte that is saved of it. Tensors in another one are dropped from them: its
        other content may share their version counters, and change.
        """
        own = np.array(self.addresses, np.int64)
        own_ends, _, gaps = ends_of(self.tensors, own)
        whole = own_ends.copy()
        whole[gaps] = own[gaps]
        others = ~Spans(own, whole).cover(begins, ends)
        if others.any():
            some = np.flatnonzero(others & (begins > 0))
            copied = Spans(*spans_of([found[number] for number in some]))
            others |= copied.meet(begins, ends)
            if (gone := copied.meet(own, own_ends)).any():
                left = np.flatnonzero(~gone).tolist()
                self.tensors = [self.tensors[number] for number in left]
                self.addresses = [self.addresses[number] for number in left]
        numbers: list[int] = np.flatnonzero(others).tolist()
        return numbers

    def let_caller_return(self) -> None:
        """Waits a moment before the copy, unless training waits for it already."""
        self.wanted.wait(_HEAD_START_S)

    @property
    def hashes_later(self) -> bool:
        """True if the state is hashed after the copy: a GPU copies many times as fast as a core hashes.

        On the CPU, bytes are hashed right after their copy, in the cache, which slows training less.
        """
        return bool(self._ready)

    @contextlib.contextmanager
    def on_side_streams(self) -> Iterator[None]:
        """Has copies from a GPU wait for the work that computes the state, and for no later work."""
        with contextlib.ExitStack() as streams:
            if self._ready:
                streams.enter_context(beside_graphs())
            for ready in self._ready:
                # Else the end of the stream would make this thread's own device, the first, the current one.
                streams.enter_context(torch.cuda.device(ready.device))
                stream = cast("Any", torch.cuda).Stream(ready.device)
                stream.wait_event(ready)
                streams.enter_context(torch.cuda.stream(stream))
            yield

    def check(self) -> None:
        """Checks, after the copy and before training continues, whether all is as it was when the save began.

        Raises ChangedError if not, and SaveError if training has not waited for the copy any longer.
        """
        if self.is_late:
            raise SaveError(
                "the checkpoint is not saved: it took so long to capture that training went on",
                operation="capture",
                tier="memory",
                hint=_SLOW,
            )
        what = ""
        if (self._count_versions(), _addresses(self.tensors)) != (self._versions, self.addresses):
            what = "a parameter, or an optimizer's tensor, was written to before the next optimizer step"
        elif list(_samples(self.tensors, self.addresses)) != self._samples:
            what = "a parameter, or an optimizer's tensor, changed while it was copied"
        elif not all(map(torch.equal, self._expected, map(_bytes_of, self.tensors))):
            what = f"a parameter, or an optimizer's tensor, is not what it was when the save began ({CHECK})"
        self._expected = ()
        if what:
            raise ChangedError(
                f"the checkpoint is not saved: {what}",
                operation="capture",
                tier="memory",
                hint="use staging: eager where anything but an optimizer's step() changes what optimizers hold",
            )


class Overlap:
    """Overlapped captures of one process; if a save is eager, logs the reason once."""

    def __init__(self, session: Session, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Takes the tiers.

        ``tensors`` returns, at each save, the tensors that only an optimizer's step changes from now on, of any shape,
        dtype and device; nothing if this save is to be eager.
        """
        self._session = session
        self._tensors = tensors
        self._is_checked = bool(os.environ.get(CHECK))
        self._current: Overlapped | None = None

    def begin(self, image: Image) -> tuple[Image, Overlapped] | None:
        """Copies the storages of a planned file that others than the optimizers may change.

        Returns the file of these copies, and the capture that is left; None if all is captured before the save returns.
        """
        return self._begin(lambda overlapped: _copied_image(image, overlapped))

    def begin_state(self, state: dict[str, Any]) -> tuple[dict[str, Any], Overlapped] | None:
        """Begins as :meth:`begin` does, of a state that is planned in the background: dictionaries and lists."""
        return self._begin(lambda overlapped: _copied_state(state, overlapped))

    def _begin(self, copied: Callable[[Overlapped], _T]) -> tuple[_T, Overlapped] | None:
        try:
            overlapped = self._left_for_later()
            if overlapped is None:
                return None
            begun = copied(overlapped), overlapped
            overlapped.begin()
        except torch.OutOfMemoryError:
            say_eager(self._session, _NO_ROOM)
            return None
        except UncopiedError as error:
            say_eager(self._session, str(error))
            return None
        self._current = overlapped
        return begun

    def forgo(self) -> None:
        """Leaves the capture that has begun, as the save is to be eager."""
        if self._current is not None:
            self._current.copied.set()
        self._current = None

    def _left_for_later(self) -> Overlapped | None:
        try:
            held = self._tensors()
            tensors = parts_here(held)
            addresses = _addresses(tensors)
        except Exception as error:
            # A layer that no batch has used yet has no tensors, for one.
            raise UncopiedError(_UNCOMMON.format(error)) from error
        if not all(addresses):
            # A tensor that is empty, freed, or made of others, such as an 8-bit one, has no memory itself.
            tensors = [each for each, address in zip(tensors, addresses, strict=True) if address]
            addresses = list(filter(None, addresses))
        sharded = [] if tensors is held else [each for each in held if hasattr(each, "_local_tensor")]
        return Overlapped(tensors, addresses, sharded, is_checked=self._is_checked) if tensors else None

    def wait(self) -> None:
        """Waits until the live state is no longer needed; call this before the state may change.

        If the wait takes longer than ``wait_timeout_s``, training continues, and the save fails; this raises SaveError
        if ``on_save_error`` is ``raise``.
        """
        current = self._current
        if current is None:
            return
        current.wanted.set()
        config = self._session.config
        timeout_s = float(config.support.wait_timeout_s)
        if not current.copied.wait(timeout_s):
            text = f"the state is not captured after {timeout_s:.0f} s, and the optimizer would change it"
            # Later copies belong to no step: they are not compared, nor waited for again.
            self._current = None
            current.is_late = True
            if config.on_save_error == "raise":
                raise SaveError(text, operation="capture", tier="memory", hint=_SLOW)
            self._session.log.warning("%s: that checkpoint is given up, training continues — %s", text, _SLOW)
        self._current = None


def _copied_image(image: Image, overlapped: Overlapped) -> Image:
    storages = [region.storage for region in image.regions]
    try:
        begins, ends = spans_of(storages)
        others = overlapped.find_others(storages, begins, ends)
    except Exception as error:
        raise UncopiedError(_UNCOMMON.format(error)) from error
    copied = {storages[number]._cdata: storages[number] for number in others}
    size = sum(map(torch.UntypedStorage.nbytes, copied.values()))
    if size and size > Spans(begins, ends).size * _MOST_EAGER:
        raise UncopiedError(_TOO_MUCH)
    if not copied:
        return image
    copies = overlapped.copies = {key: cast("Any", storage).clone() for key, storage in copied.items()}
    regions = cast("StorageRegions", image.regions)
    own = [copies.get(each._cdata, each) for each in regions.storages]
    return dataclasses.replace(image, regions=dataclasses.replace(regions, storages=own))


def _copied_state(state: dict[str, Any], overlapped: Overlapped) -> dict[str, Any]:
    try:
        snapshot = Snapshot(state, overlapped.find_others)
    except Exception as error:
        raise UncopiedError(str(error)) from error
    if snapshot.copied_size > _MOST_EAGER * snapshot.size:
        raise UncopiedError(_TOO_MUCH)
    snapshot.copy(overlapped.tensors)
    overlapped.size = snapshot.size
    return snapshot.state


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _samples(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Iterator[bytes]:
    """Returns a few bytes from the middle of some tensors, which begin at these addresses."""
    step = max(1, len(tensors) // _SAMPLES)
    for tensor, address in zip(tensors[::step], addresses[::step], strict=True):
        if tensor.is_cpu and tensor.is_contiguous():
            nbytes = tensor.nbytes
            length = min(_SAMPLE_BYTES, nbytes)
            yield ctypes.string_at(address + (nbytes - length) // 2, length)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes, from its first element to its last one."""
    start = tensor.storage_offset() * tensor.element_size()
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return data.set_(cast("Any", tensor.untyped_storage()), start, (extent(tensor),), (1,))
