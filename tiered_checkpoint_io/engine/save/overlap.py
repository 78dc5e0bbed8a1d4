"""Overlapped capture: what only the optimizers change is copied while the next forward and backward run.

Who trains says which tensors these are, and waits before an optimizer's step: see :meth:`Overlap.wait`. That wait is
the guarantee. All other bytes are copied before the save returns. Once all is copied, *witnesses* are looked at:
version counters, addresses, and a few bytes of some tensors. None of them proves that nothing has changed, but what
shows a change fails this save, and later ones are eager: a checkpoint never mixes two steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map

from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.image import collecting_later
from tiered_checkpoint_io.formats.skeleton import ODD, DoubtError, Skeleton, scan

#: Of a save that never overlaps.
OF_PARTS = "of sharded and local checkpoints, only asynchronous ones of TieredModelParallelStrategy overlap training"
#: Of the saves after one that failed for it.
FOUND_CHANGED = "a capture has found the state changed"
#: Set to anything, what was copied is compared, once it is, with another copy that was made when the save began.
CHECK = "TIERED_CHECKPOINT_CHECK_STAGING"
#: Where more than this part of a file is not the optimizers' alone, an eager copy into a slot is faster.
_MOST_EAGER = 1 / 3
#: So many tensors, so many bytes of each, are compared with what was captured.
_SAMPLES, _SAMPLE_BYTES = 8, 64
#: So long the copy waits, seconds, so that the save's caller returns before another thread needs the interpreter.
_HEAD_START_S = 0.005


class ChangedError(SaveError):
    """What was being captured has changed meanwhile."""


@dataclass(slots=True)
class Overlapped:
    """One capture that goes on when the save has returned.

    Attributes:
        tensors: What only the optimizers change; all else is copied already.
        state: What is to be saved; None once it is.
        size: Its bytes, about.
        copied: Set once nothing of the live state is needed any more.
        wanted: Set once training waits for that.
        stall_s: How long the save's caller waited, seconds.
        made: What the caller was told of the save.
    """

    tensors: Sequence[torch.Tensor]
    state: Any
    size: int
    copied: threading.Event = field(default_factory=threading.Event)
    wanted: threading.Event = field(default_factory=threading.Event)
    stall_s: float = 0.0
    made: SaveReport | None = None
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _samples: list[bytes] = field(default_factory=list)
    _expected: list[torch.Tensor] = field(default_factory=list)
    _ready: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Notes the witnesses; the copy may begin on another thread."""
        self._seen, self._samples = _witnesses(self.tensors), list(_samples(self.tensors))
        if cast("Any", torch.cuda).is_initialized():
            # Whatever computes the state has been queued by now.
            devices = {tensor.device for tensor in self.tensors if tensor.is_cuda}
            self._ready = [torch.cuda.current_stream(device).record_event() for device in devices]
        if os.environ.get(CHECK):
            self._expected = [_bytes_of(tensor).clone() for tensor in self.tensors]

    def let_caller_return(self) -> None:
        """Waits a moment before the copy, unless training waits for it already."""
        self.wanted.wait(_HEAD_START_S)

    @property
    def hashes_later(self) -> bool:
        """Whether it is hashed after the copy: a GPU copies many times as fast as a core hashes.

        On the CPU, what was just copied is hashed while it is in the cache, which costs the training beside it less.
        """
        return bool(self._ready)

    @contextlib.contextmanager
    def on_side_streams(self) -> Iterator[None]:
        """Has copies from a GPU wait for what computes the state, and for nothing that is queued later."""
        with contextlib.ExitStack() as streams:
            for ready in self._ready:
                stream = cast("Any", torch.cuda).Stream(ready.device)
                stream.wait_event(ready)
                streams.enter_context(torch.cuda.stream(stream))
            yield

    def release(self) -> None:
        """Lets training go on: nothing of the live state is needed any more."""
        self.tensors, self.state, self._expected = (), None, []
        self.copied.set()

    def check(self) -> None:
        """Looks, after the copy and before training goes on, whether all is as it was when the save began.

        Raises:
            ChangedError: It is not.
        """
        what = ""
        if _witnesses(self.tensors) != self._seen:
            what = "a parameter, or an optimizer's tensor, was written to before the next optimizer step"
        elif list(_samples(self.tensors)) != self._samples:
            what = "a parameter, or an optimizer's tensor, changed while it was copied"
        elif not all(map(torch.equal, self._expected, map(_bytes_of, self.tensors))):
            what = f"a parameter, or an optimizer's tensor, is not what it was when the save began ({CHECK})"
        if what:
            raise ChangedError(
                f"the checkpoint is not saved: {what}",
                operation="capture",
                tier="memory",
                hint="use staging: eager where anything but an optimizer's step() changes what optimizers hold",
            )


class Overlap:
    """Overlapped captures of one process; where the save is to be eager, it says why, once for each reason.

    Attributes:
        newest: The last capture that went on when its save had returned.
    """

    def __init__(self, session: Session, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Takes the tiers.

        Args:
            session: Both tiers.
            tensors: Called at each save: what nothing but an optimizer's step changes from now on, of any shape, dtype
                and device; nothing where this save is to be eager.
        """
        self._session = session
        self._tensors = tensors
        self._current: Overlapped | None = None
        self.newest: Overlapped | None = None

    def begin(self, state: object, size_of: Callable[[Skeleton], int]) -> Overlapped | None:
        """Takes the structure of a state that goes into one file, and copies of what others may change.

        Args:
            state: Anything that ``torch.save`` takes.
            size_of: How large its file will be, about.

        Returns:
            What is left to do; None where all of it is to be captured before the save returns.
        """
        tensors = self._tensors()
        if not tensors:
            return None
        try:
            with collecting_later():
                skeleton = scan(state)
            size = size_of(skeleton)
            apart = _apart(skeleton, tensors, int(size * _MOST_EAGER))
        except Exception:
            # Whatever the reason, torch.save is the judge of it.
            say_eager(self._session, "the state holds what can't be copied apart from it")
            return None
        if apart is None:
            self._say_too_much()
            return None
        return _begun(tensors, apart, size)

    def begin_part(self, state: Any) -> Overlapped | None:
        """As :meth:`begin`, of a rank's part of a sharded checkpoint: dictionaries and lists of tensors."""
        tensors = self._tensors()
        if not tensors:
            return None
        kept, sizes = _storages(tensors), {True: 0, False: 0}

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            is_kept = value.layout == torch.strided and local(value).untyped_storage()._cdata in kept
            sizes[is_kept] += local(value).nbytes
            return value if is_kept else value.detach().clone()

        state = tree_map(copied, state)
        if sizes[False] > _MOST_EAGER * sum(sizes.values()):
            self._say_too_much()
            return None
        return _begun(tensors, state, sum(sizes.values()))

    def leave(self, overlapped: Overlapped) -> None:
        """Takes note that a save returns before its capture is done: from now on, :meth:`wait` waits for that."""
        self._current = self.newest = overlapped

    def _say_too_much(self) -> None:
        say_eager(self._session, "much of the state is changed by others than the optimizers")

    def wait(self) -> None:
        """Waits until nothing of the live state is needed any more: to be called before it may change.

        Raises:
            SaveError: It takes longer than ``wait_timeout_s``.
        """
        current = self._current
        if current is None:
            return
        current.wanted.set()
        timeout_s = float(self._session.config.wait_timeout_s)
        if not current.copied.wait(timeout_s):
            raise SaveError(
                f"the state is not captured after {timeout_s:.0f} s, and the optimizer would change it",
                operation="capture",
                tier="memory",
                hint="see whether the node is out of memory or of processor time; or use staging: eager",
            )
        self._current = None


def _begun(tensors: Sequence[torch.Tensor], state: Any, size: int) -> Overlapped:
    overlapped = Overlapped(tensors, state, size)
    overlapped.begin()
    return overlapped


def say_eager(session: Session, why: str) -> None:
    """Tells once, where overlapped captures are asked for, why a save is none."""
    staging = session.config.staging
    if staging != "eager" and f"staging: {why}" not in session.warned:
        session.warned.add(f"staging: {why}")
        session.log.info("staging is %s, but the state is captured before a save returns: %s", staging, why)


def _apart(skeleton: Skeleton, kept: Sequence[torch.Tensor], most: int) -> Skeleton | None:
    """A skeleton with copies of all tensors but those ``kept``; None where the copies have more than ``most`` bytes.

    Raises:
        DoubtError: A tensor is more than its elements.
        Exception: It has no storage, or one that can't be copied.
    """
    if any(map(attrgetter("__dict__"), skeleton.tensors)):
        raise DoubtError("a tensor has attributes")
    mine, theirs = set(map(id, skeleton.tensors)), set(map(id, kept))
    others = {number: tensor for number, tensor in enumerate(skeleton.tensors) if id(tensor) not in theirs}
    # Most are the optimizers' own objects, which need not be asked; of parameters, states hold others.
    for some in ([each for each in kept if id(each) not in mine], kept):
        storages = _storages(some)
        others = {n: each for n, each in others.items() if each.untyped_storage()._cdata not in storages}
        if not others:
            return skeleton
    if any(method(tensor) for tensor in others.values() for method in (*ODD, attrgetter("is_quantized"))):
        raise DoubtError("a tensor is of an uncommon kind")
    copies = {storage._cdata: storage for storage in map(torch.Tensor.untyped_storage, others.values())}
    if sum(storage.nbytes() for storage in copies.values()) > most:
        return None
    copies = {identity: cast("Any", storage).clone() for identity, storage in copies.items()}
    found = list(skeleton.tensors)
    for number, tensor in others.items():
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(copies[tensor.untyped_storage()._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        found[number] = copy.requires_grad_(tensor.requires_grad)
    return dataclasses.replace(skeleton, tensors=tuple(found))


def _witnesses(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return list(zip(map(attrgetter("_version"), tensors), map(torch.Tensor.data_ptr, tensors), strict=True))


def _samples(tensors: Sequence[torch.Tensor]) -> Iterator[bytes]:
    """A few bytes from the middle of some tensors."""
    for tensor in tensors[:: max(1, len(tensors) // _SAMPLES)]:
        if tensor.is_cpu and tensor.is_contiguous():
            nbytes = tensor.nbytes
            length = min(_SAMPLE_BYTES, nbytes)
            yield ctypes.string_at(tensor.data_ptr() + (nbytes - length) // 2, length)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(cast("Any", tensor.untyped_storage()))


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {storage._cdata for storage in map(torch.Tensor.untyped_storage, tensors)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; other tensors as they are."""
    of_rank: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return of_rank
