"""Overlapped capture: tensors that only optimizers change are copied while the next forward and backward run.

The trainer names these tensors, and waits before an optimizer's step: see :meth:`Overlap.wait`. This wait is the
guarantee. All other bytes are copied before the save returns. After the copy, *witnesses* are compared: version
counters, addresses, and a few bytes of some tensors. They cannot prove that no tensor has changed. But if a witness
shows a change, this save fails, and later ones are eager: a checkpoint never mixes two steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch

from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.save.snapshot import Snapshot, UncopiedError
from tiered_checkpoint_io.engine.save.spans import (
    Found,
    Integers,
    Spans,
    ends_of,
    extent,
    parts_here,
    spans_of,
)
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.host_pins import beside_graphs
from tiered_checkpoint_io.engine.staging.latch import Latch
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.image import Image, StorageRegions

#: Reason for a save that never overlaps.
OF_PARTS = "of sharded and local checkpoints, only asynchronous ones of TieredModelParallelStrategy overlap training"
#: Reason for the saves after one that failed for a changed state.
FOUND_CHANGED = "a capture has found the state changed"
#: If set, each finished copy is compared with another copy that was made when the save began.
CHECK = "TIERED_CHECKPOINT_CHECK_STAGING"
_SLOW = "see whether the node is out of memory or of processor time; or use staging: eager"
#: A sparse tensor, for one, has no memory of its own.
_UNCOMMON = "it holds what can't be copied as it is: {}"
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
        addresses: Their addresses.
        sharded: The sharded tensors among those that the optimizers hold, which have version counters of their own.
        copies: For a full checkpoint, copies of all other storages, by the storage that was copied.
        copied: Set once the live state is no longer needed.
        wanted: Set once training waits for ``copied``.
        size: Bytes of the state, of a sharded one.
        stall_s: Time for which the save's caller waited, seconds.
        made: Report that the caller got about the save.
        is_late: True if training continued before the copy was done.
        is_checked: True if :data:`CHECK` is set.
    """

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    sharded: Sequence[torch.Tensor] = ()
    copies: Mapping[int, torch.UntypedStorage] = field(default_factory=dict)
    copied: Latch = field(default_factory=Latch)
    wanted: Latch = field(default_factory=Latch)
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
        """Finds the tensors to copy at once; a storage is copied whole, or not at all.

        A storage is left in place if :attr:`tensors` hold every byte that is saved of it. Tensors in another
        one are dropped from them: its other content may share their version counters, and change.

        Args:
            found: All saved objects: storages, which are saved whole; or tensors.
            begins: Start of each; 0 if it has no memory of its own.
            ends: End of each.

        Returns:
            The numbers of those that are to be copied.
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

    def with_copies(self, image: Image) -> Image:
        """Returns a planned file, with :attr:`copies` instead of their originals."""
        if not self.copies:
            return image
        regions = cast("StorageRegions", image.regions)
        storages = [self.copies.get(each._cdata, each) for each in regions.storages]
        return dataclasses.replace(image, regions=dataclasses.replace(regions, storages=storages))

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

        Raises:
            ChangedError: The state has changed.
            SaveError: Training has not waited for the copy any longer.
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

        Args:
            session: Both tiers.
            tensors: Returns, at each save, the tensors that only an optimizer's step changes from now on, of any shape,
                dtype and device; nothing if this save is to be eager.
        """
        self._session = session
        self._tensors = tensors
        self._is_checked = bool(os.environ.get(CHECK))
        self._current: Overlapped | None = None

    def begin(self, image: Image) -> tuple[Image, Overlapped] | None:
        """Copies the storages of a planned file that others than the optimizers may change.

        Returns:
            The file of these copies, and the capture that is left; None if all is captured before the save returns.
        """
        overlapped = self._left_for_later()
        if overlapped is None:
            return None
        storages = [region.storage for region in image.regions]
        try:
            begins, ends = spans_of(storages)
            others = overlapped.find_others(storages, begins, ends)
        except Exception as error:
            say_eager(self._session, _UNCOMMON.format(error))
            return None
        copied = {storages[number]._cdata: storages[number] for number in others}
        size = sum(map(torch.UntypedStorage.nbytes, copied.values()))
        if size and size > Spans(begins, ends).size * _MOST_EAGER:
            self._say_too_much()
            return None
        try:
            overlapped.copies = {key: cast("Any", storage).clone() for key, storage in copied.items()}
            overlapped.begin()
        except torch.OutOfMemoryError:
            say_eager(self._session, _NO_ROOM)
            return None
        self._current = overlapped
        return overlapped.with_copies(image), overlapped

    def begin_state(self, state: dict[str, Any]) -> tuple[dict[str, Any], Overlapped] | None:
        """Begins as :meth:`begin` does, of a state that is planned in the background: dictionaries and lists."""
        overlapped = self._left_for_later()
        if overlapped is None:
            return None
        try:
            snapshot = Snapshot(state, overlapped.find_others)
        except Exception as error:
            say_eager(self._session, str(error))
            return None
        if snapshot.copied_size > _MOST_EAGER * snapshot.size:
            self._say_too_much()
            return None
        try:
            snapshot.copy(overlapped.tensors)
            overlapped.begin()
        except torch.OutOfMemoryError:
            say_eager(self._session, _NO_ROOM)
            return None
        except UncopiedError as error:
            say_eager(self._session, str(error))
            return None
        overlapped.size = snapshot.size
        self._current = overlapped
        return snapshot.state, overlapped

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
            say_eager(self._session, _UNCOMMON.format(error))
            return None
        if not all(addresses):
            # A tensor that is empty, freed, or made of others, such as an 8-bit one, has no memory itself.
            tensors = [each for each, address in zip(tensors, addresses, strict=True) if address]
            addresses = list(filter(None, addresses))
        sharded = [] if tensors is held else [each for each in held if hasattr(each, "_local_tensor")]
        return Overlapped(tensors, addresses, sharded, is_checked=self._is_checked) if tensors else None

    def _say_too_much(self) -> None:
        say_eager(self._session, "much of the state is changed by others than the optimizers")

    def wait(self) -> None:
        """Waits until the live state is no longer needed; call this before the state may change.

        If the wait takes longer than ``wait_timeout_s``, training continues, and the save fails.

        Raises:
            SaveError: The wait takes longer, and ``on_save_error`` is ``raise``.
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


def say_eager(session: Session, why: str) -> None:
    """Logs once, if overlapped captures are asked for, why a save is not overlapped."""
    staging = session.config.staging
    if staging != "eager" and f"staging: {why}" not in session.warned:
        session.warned.add(f"staging: {why}")
        session.log.info("staging is %s, but the state is captured before a save returns: %s", staging, why)


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
