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
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import torch

from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.filling import Region, StorageRegion, StorageRegions, devices_of
from tiered_checkpoint_io.formats.image import Image

#: Of a save that never overlaps.
OF_PARTS = "it is part of a sharded or local checkpoint"
#: Set to anything, each overlapped save is compared with an eager copy of the same moment, which needs the memory.
CHECK = "TIERED_CHECKPOINT_CHECK_STAGING"
#: Where more than this part of a file is not the optimizers' alone, an eager copy into a slot is faster.
_MOST_EAGER = 1 / 3
#: So many tensors, so many bytes of each, are compared with what was captured.
_SAMPLES, _SAMPLE_BYTES = 64, 64
#: So long the copy waits, seconds, so that the save's caller returns before another thread needs the interpreter.
_HEAD_START_S = 0.005


class ChangedError(SaveError):
    """What was being captured has changed meanwhile."""


@dataclass(slots=True)
class Overlapped:
    """One capture that goes on when the save has returned.

    Attributes:
        image: The file, with copies of all that others than the optimizers may change.
        tensors: What only they change.
        copied: Set once nothing of the live state is needed any more.
        wanted: Set once training waits for that.
    """

    image: Image
    tensors: list[torch.Tensor]
    copied: threading.Event = field(default_factory=threading.Event)
    wanted: threading.Event = field(default_factory=threading.Event)
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _samples: list[tuple[int, bytes]] = field(default_factory=list)
    _expected: bytearray | None = None
    _ready: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Notes the witnesses; the copy may begin on another thread."""
        self._seen = _witnesses(self.tensors)
        self._samples = list(_samples(self.image.regions))
        for device in devices_of(self.image.regions):
            if device.type == "cuda":
                # Whatever computes the state has been queued by now.
                self._ready.append(torch.cuda.current_stream(device).record_event())
        if os.environ.get(CHECK):
            self._expected = bytearray(self.image.size)
            self.image.fill(memoryview(self._expected), hashed=False)

    def let_caller_return(self) -> None:
        """Waits a moment before the copy, unless training waits for it already."""
        self.wanted.wait(_HEAD_START_S)

    @property
    def hashes_later(self) -> bool:
        """Whether the copy alone is faster enough to hash it behind: a GPU copies many times as fast as a core hashes.

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

    def check(self, view: memoryview) -> None:
        """Looks whether what was captured is what the save began with.

        Args:
            view: The captured file.

        Raises:
            ChangedError: It is not.
        """
        what = ""
        if _witnesses(self.tensors) != self._seen:
            what = "a parameter, or an optimizer's tensor, was written to before the next optimizer step"
        elif any(view[offset : offset + len(data)] != data for offset, data in self._samples):
            what = "a parameter, or an optimizer's tensor, changed before it was copied"
        elif self._expected is not None and view[: len(self._expected)] != self._expected:
            what = f"what was captured is not what an eager copy holds ({CHECK})"
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
        has_begun: Whether a capture has begun since somebody last set this to False.
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
        self.has_begun = False

    def begin(self, image: Image) -> Overlapped | None:
        """Copies what others than the optimizers may change.

        Args:
            image: The file, planned.

        Returns:
            What is left to do; None where all of it is to be captured before the save returns.
        """
        tensors = list(self._tensors()) if image.planned else []
        if not tensors:
            return None
        kept = {storage._cdata for storage in map(torch.Tensor.untyped_storage, tensors)}
        regions = _apart(image.regions, kept, int(image.size * _MOST_EAGER))
        if regions is None:
            say_eager(self._session, "much of the state is changed by others than the optimizers")
            return None
        overlapped = Overlapped(dataclasses.replace(image, regions=regions), tensors)
        overlapped.begin()
        self._current, self.has_begun = overlapped, True
        return overlapped

    @property
    def is_copying(self) -> bool:
        """Whether a capture goes on that needs the live state."""
        return self._current is not None and not self._current.copied.is_set()

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


def say_eager(session: Session, why: str) -> None:
    """Tells once, where overlapped captures are asked for, why a save is none."""
    staging = session.config.staging
    if staging != "eager" and f"staging: {why}" not in session.warned:
        session.warned.add(f"staging: {why}")
        session.log.info("staging is %s, but the state is captured before a save returns: %s", staging, why)


def _apart(regions: Sequence[Region], kept: set[int], most: int) -> Sequence[Region] | None:
    """The regions, with copies of all storages but those ``kept``; None where these have more than ``most`` bytes."""
    if isinstance(regions, StorageRegions):
        storages = regions.storages
        others = [index for index, storage in enumerate(storages) if storage._cdata not in kept]
        if sum(int(regions.lengths[index]) for index in others) > most:
            return None
        copies = list(storages)
        for index in others:
            copies[index] = _copy_of(storages[index])
        return dataclasses.replace(regions, storages=copies)
    others = [index for index, region in enumerate(regions) if region.storage._cdata not in kept]
    if sum(regions[index].storage.nbytes() for index in others) > most:
        return None
    copied: dict[int, torch.UntypedStorage] = {}
    found = list(regions)
    for index in others:
        region = found[index]
        if not isinstance(region, StorageRegion):
            return None
        storage = region.storage
        if storage._cdata not in copied:
            copied[storage._cdata] = _copy_of(storage)
        found[index] = region._replace(storage=copied[storage._cdata])
    return found


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy: torch.UntypedStorage = cast("Any", storage).clone()
    return copy


def _witnesses(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return list(zip(map(attrgetter("_version"), tensors), map(torch.Tensor.data_ptr, tensors), strict=True))


def _samples(regions: Sequence[Region]) -> Iterator[tuple[int, bytes]]:
    """A few bytes from the middle of some storages, and where in the file they belong."""
    chosen = slice(None, None, max(1, len(regions) // _SAMPLES))
    found: Iterable[tuple[int, int, torch.UntypedStorage, int]]
    if isinstance(regions, StorageRegions):
        offsets, lengths = regions.offsets[chosen].tolist(), regions.lengths[chosen].tolist()
        found = zip(offsets, lengths, regions.storages[chosen], itertools.repeat(0))
    else:
        found = [each for each in regions[chosen] if isinstance(each, StorageRegion)]
    for offset, nbytes, storage, start in found:
        if storage.device.type == "cpu":
            length = min(_SAMPLE_BYTES, nbytes)
            begin = (nbytes - length) // 2
            yield offset + begin, ctypes.string_at(storage.data_ptr() + start + begin, length)
