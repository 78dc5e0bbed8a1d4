"""Overlapped capture: what only the optimizers change is copied while the next forward and backward run.

Who trains says which tensors these are, and waits before an optimizer's step: see :meth:`Overlap.wait`. That wait is
the guarantee. All other bytes are copied before the save returns. Once all is copied, *witnesses* are looked at:
version counters, addresses, and a few bytes of some tensors. None of them proves that nothing has changed, but what
shows a change fails this save, and later ones are eager: a checkpoint never mixes two steps.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import torch

from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.engine.save.snapshot import Snapshot, UncopiedError
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.host_pins import beside_graphs
from tiered_checkpoint_io.engine.staging.latch import Latch
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.filling import StorageRegion, StorageRegions
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.skeleton import Skeleton, apart

_Found = torch.Tensor | torch.UntypedStorage
#: Of a save that never overlaps.
OF_PARTS = "of sharded and local checkpoints, only asynchronous ones of TieredModelParallelStrategy overlap training"
#: Of the saves after one that failed for it.
FOUND_CHANGED = "a capture has found the state changed"
#: Set to anything, what was copied is compared, once it is, with another copy that was made when the save began.
CHECK = "TIERED_CHECKPOINT_CHECK_STAGING"
_SLOW = "see whether the node is out of memory or of processor time; or use staging: eager"
#: A sparse tensor, for one, has no memory of its own.
_UNCOMMON = "it holds what can't be copied as it is: {}"
_NO_ROOM = "the GPU has no room for the copies that an overlapped save makes there"
#: Where more than this part of a file is not the optimizers' alone, an eager copy into a slot is faster.
_MOST_EAGER = 1 / 3
#: So many tensors, so many bytes of each, are compared with what was captured.
_SAMPLES, _SAMPLE_BYTES = 4, 64
#: So long the copy waits, seconds, so that the save's caller returns before another thread needs the interpreter.
_HEAD_START_S = 0.005


class ChangedError(SaveError):
    """What was being captured has changed meanwhile."""


@dataclass(slots=True)
class Overlapped:
    """One capture that goes on when the save has returned.

    Attributes:
        tensors: What only the optimizers change; all else is copied already.
        addresses: Where they begin.
        copies: Of a full checkpoint, copies of all else, by what was copied: storages, by their identity.
        copied: Set once nothing of the live state is needed any more.
        wanted: Set once training waits for that.
        size: Bytes of the state, of a sharded one.
        stall_s: How long the save's caller waited, seconds.
        made: What the caller was told of the save.
        is_late: Whether training has gone on before the copy was done.
        is_sent: Whether it is not copied, but sent from the live state.
        is_checked: Whether :data:`CHECK` is set.
    """

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    copies: Mapping[int, torch.UntypedStorage] = field(default_factory=dict)
    copied: Latch = field(default_factory=Latch)
    wanted: Latch = field(default_factory=Latch)
    size: int = 0
    stall_s: float = 0.0
    made: SaveReport | None = None
    is_late: bool = False
    is_sent: bool = False
    is_checked: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _versions: Sequence[int] = ()
    _samples: Sequence[bytes] = ()
    _expected: Sequence[torch.Tensor] = ()
    _ready: Sequence[Any] = ()

    def begin(self) -> None:
        """Notes the witnesses. All else has been copied by now, or its copy is queued on the GPU."""
        self._versions = _versions(self.tensors)
        self._samples = list(_samples(self.tensors, self.addresses))
        if self.is_checked:
            self._expected = [_bytes_of(tensor).clone() for tensor in self.tensors]
        if cast("Any", torch.cuda).is_initialized():
            devices = {each for each in map(attrgetter("device"), self.tensors) if each.type == "cuda"}
            # Whatever computes the state, and what copies it, has been queued by now.
            self._ready = [torch.cuda.current_stream(each).record_event() for each in devices]

    def with_copies(self, image: Image) -> Image:
        """A planned file, with :attr:`copies` in place of what they are copies of."""
        if not self.copies:
            return image
        regions = image.regions
        if isinstance(regions, StorageRegions):
            storages = [self.copies.get(each._cdata, each) for each in regions.storages]
            return dataclasses.replace(image, regions=dataclasses.replace(regions, storages=storages, addresses=None))
        found = cast("Sequence[StorageRegion]", regions)
        return dataclasses.replace(
            image, regions=[each._replace(storage=self.copies.get(each.storage._cdata, each.storage)) for each in found]
        )

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
            if self._ready:
                streams.enter_context(beside_graphs())
            for ready in self._ready:
                # Else the end of the stream would make this thread's own device, the first, the current one.
                streams.enter_context(torch.cuda.device(ready.device))
                stream = cast("Any", torch.cuda).Stream(ready.device)
                stream.wait_event(ready)
                streams.enter_context(torch.cuda.stream(stream))
            yield

    def give_up(self) -> bool:
        """Has this save fail, so that training need not wait; False where it is being sent from the live state."""
        with self._lock:
            self.is_late = not self.is_sent
        return self.is_late

    def begin_to_send(self) -> None:
        """As :meth:`check`, before it is sent from the live state: from now on it can't be given up."""
        with self._lock:
            self.is_sent = True
        self.check()

    def check(self) -> None:
        """Checks, after the copy and before training continues, whether all is as it was when the save began.

        Raises:
            ChangedError: It is not.
            SaveError: Training has not waited for that any longer.
        """
        if self.is_late:
            raise SaveError(
                "the checkpoint is not saved: it took so long to capture that training went on",
                operation="capture",
                tier="memory",
                hint=_SLOW,
            )
        what = ""
        if (_versions(self.tensors), _addresses(self.tensors)) != (self._versions, self.addresses):
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
    """Overlapped captures of one process; where the save is to be eager, it says why, once for each reason.

    Attributes:
        newest: The last capture that began.
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
        self._is_checked = bool(os.environ.get(CHECK))
        self._current: Overlapped | None = None
        self.newest: Overlapped | None = None

    def begin(self, storages: Sequence[torch.UntypedStorage]) -> Overlapped | None:
        """Copies what others than the optimizers may change, of all storages of a state that is planned.

        Returns:
            What is left to do. None where all is to be captured before the save returns.
        """
        begun = self._copy_others(storages)
        if begun is None:
            return None
        self._current = self.newest = begun[0]
        return begun[0]

    def begin_taken(self, taken: Skeleton) -> tuple[Skeleton, Overlapped] | None:
        """As :meth:`begin`, of a state that is planned in the background, from what was taken of it.

        Returns:
            It has tensors of its own then, in place of what may be replaced or resized from now on.
        """
        begun = self._copy_others(taken.tensors)
        if begun is None:
            return None
        overlapped, others = begun
        if others:
            try:
                taken = apart(taken, cast("Sequence[torch.Tensor]", others), overlapped.copies)
            except Exception as error:
                say_eager(self._session, _UNCOMMON.format(error))
                return None
        self._current = self.newest = overlapped
        return taken, overlapped

    def _copy_others(self, found: Sequence[_Found]) -> tuple[Overlapped, list[_Found]] | None:
        """Copies all else, which comes with it, and notes the witnesses; None where the save is to be eager."""
        overlapped = self._left_for_later()
        if overlapped is None:
            return None
        try:
            others = _others(found, overlapped.tensors, overlapped.addresses)
        except RuntimeError as error:
            say_eager(self._session, _UNCOMMON.format(error))
            return None
        storages = {storage._cdata: storage for storage in map(_storage_of, others)}
        copied = sum(map(torch.UntypedStorage.nbytes, storages.values()))
        # What shares a storage counts twice: this is about time alone.
        if copied and copied > sum(map(_nbytes_of, found)) * _MOST_EAGER:
            self._say_too_much()
            return None
        try:
            overlapped.copies = {key: cast("Any", storage).clone() for key, storage in storages.items()}
            overlapped.begin()
        except torch.OutOfMemoryError:
            say_eager(self._session, _NO_ROOM)
            return None
        return overlapped, others

    def begin_state(self, state: dict[str, Any]) -> tuple[dict[str, Any], Overlapped] | None:
        """As :meth:`begin`, of a state that is planned in the background: dictionaries and lists of anything."""
        overlapped = self._left_for_later()
        if overlapped is None:
            return None
        try:
            snapshot = Snapshot(state, overlapped.addresses)
        except (UncopiedError, RuntimeError) as error:
            say_eager(self._session, str(error))
            return None
        if snapshot.copied_size > _MOST_EAGER * snapshot.size:
            self._say_too_much()
            return None
        try:
            snapshot.copy()
            overlapped.begin()
        except torch.OutOfMemoryError:
            say_eager(self._session, _NO_ROOM)
            return None
        overlapped.size = snapshot.size
        self._current = self.newest = overlapped
        return snapshot.state, overlapped

    def forgo(self) -> None:
        """Leaves the capture that has begun, as the save is to be eager."""
        if self._current is not None:
            self._current.copied.set()
        self._current = self.newest = None

    def _left_for_later(self) -> Overlapped | None:
        try:
            tensors = self._tensors()
            addresses = _addresses(tensors)
        except RuntimeError as error:
            say_eager(self._session, _UNCOMMON.format(error))
            return None
        if not all(addresses):
            # What is empty, freed, or made of other tensors, as one of 8 bits is, lies nowhere itself.
            tensors = [each for each, address in zip(tensors, addresses, strict=True) if address]
            addresses = list(filter(None, addresses))
        return Overlapped(tensors, addresses, is_checked=self._is_checked) if tensors else None

    def _say_too_much(self) -> None:
        say_eager(self._session, "much of the state is changed by others than the optimizers")

    def wait(self) -> None:
        """Waits until nothing of the live state is needed any more: to be called before it may change.

        Where that takes longer than ``wait_timeout_s``, training goes on, and the save fails.

        Raises:
            SaveError: It takes longer, and ``on_save_error`` is ``raise``, or the live state is being sent.
        """
        current = self._current
        if current is None:
            return
        current.wanted.set()
        config = self._session.config
        timeout_s = float(config.support.wait_timeout_s)
        if not current.copied.wait(timeout_s):
            text = f"the state is not captured after {timeout_s:.0f} s, and the optimizer would change it"
            # What is copied after that is not looked at: it is of no step. Nor is it waited for again.
            self._current = None
            given_up = current.give_up()
            if config.on_save_error == "raise" or not given_up:
                raise SaveError(text, operation="capture", tier="memory", hint=_SLOW)
            self._session.log.warning("%s: that checkpoint is given up, training continues — %s", text, _SLOW)
        self._current = None


def say_eager(session: Session, why: str) -> None:
    """Tells once, where overlapped captures are asked for, why a save is none."""
    staging = session.config.staging
    if staging != "eager" and f"staging: {why}" not in session.warned:
        session.warned.add(f"staging: {why}")
        session.log.info("staging is %s, but the state is captured before a save returns: %s", staging, why)


def _others(found: Iterable[_Found], kept: Sequence[torch.Tensor], addresses: Sequence[int]) -> list[_Found]:
    """Those in whose storages none of the ``kept`` tensors lies; these begin at the ``addresses``."""
    # A training waits for this, and nearly all are kept: what is the same, or begins at the same place, is not looked
    # at any closer.
    same, begins = set(map(id, kept)), set(addresses)
    others = [each for each in found if id(each) not in same and each.data_ptr() not in begins]
    ordered = sorted(addresses) if others else []
    return [each for each in others if not _holds_any(_storage_of(each), ordered)]


def _holds_any(storage: torch.UntypedStorage, ordered: list[int]) -> bool:
    start = storage.data_ptr()
    at = bisect.bisect_left(ordered, start)
    return at < len(ordered) and ordered[at] < start + storage.nbytes()


def _storage_of(found: _Found) -> torch.UntypedStorage:
    return found.untyped_storage() if isinstance(found, torch.Tensor) else found


def _nbytes_of(found: _Found) -> int:
    return found.nbytes if isinstance(found, torch.Tensor) else found.nbytes()


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(attrgetter("_version"), tensors))


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _samples(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Iterator[bytes]:
    """A few bytes from the middle of some tensors, which begin at these addresses."""
    step = max(1, len(tensors) // _SAMPLES)
    for tensor, address in zip(tensors[::step], addresses[::step], strict=True):
        if tensor.is_cpu and tensor.is_contiguous():
            nbytes = tensor.nbytes
            length = min(_SAMPLE_BYTES, nbytes)
            yield ctypes.string_at(address + (nbytes - length) // 2, length)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(cast("Any", tensor.untyped_storage()))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; other tensors as they are."""
    of_rank: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return of_rank
