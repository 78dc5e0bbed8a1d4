"""Saver: a state becomes a committed part in the memory tier, in three steps.

*plan* lays the file out; *capture* copies the tensors into a slot and hashes them; *seal* commits.
When ``save`` returns, the part is complete, and no later change of a tensor is in it.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import torch

from tiered_checkpoint_io.engine.staging import retention
from tiered_checkpoint_io.errors import MemoryFullError
from tiered_checkpoint_io.formats.image import Image, plan
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Metric, Part
from tiered_checkpoint_io.version import __version__


@dataclass(frozen=True, slots=True)
class Facts:
    """What a save is about, beside its state."""

    name: str
    save_id: str
    step: int
    epoch: int
    world_size: int
    rank: int
    dirpath: str
    durable: bool
    metric: Metric | None = None
    resumable: bool = True


class HostPins:
    """Registers slots as pinned memory, once each, so that a GPU copies into them at full speed."""

    def __init__(self) -> None:
        self._pinned: dict[int, int] = {}

    def pin(self, view: memoryview) -> None:
        """Registers the pages of ``view``; a refusal only costs speed."""
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        if self._pinned.get(address, 0) >= len(view):
            return
        runtime: Any = cast("Any", torch.cuda).cudart()
        if address in self._pinned:
            runtime.cudaHostUnregister(address)
        if int(runtime.cudaHostRegister(address, len(view), 0)) == 0:
            self._pinned[address] = len(view)

    def unpin(self, view: memoryview) -> None:
        """Ends the registration of a mapping that is about to end."""
        if not self._pinned:
            return
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        if self._pinned.pop(address, None) is not None:
            runtime: Any = cast("Any", torch.cuda).cudart()
            runtime.cudaHostUnregister(address)


class Saver:
    """Saves the parts of one rank into the memory tier."""

    def __init__(self, tier: MemoryTier, *, keep_last: int, pins: HostPins | None = None) -> None:
        """Takes an open tier.

        Args:
            tier: Where to.
            keep_last: How many checkpoints memory keeps.
            pins: The register of pinned memory that the tier tells of ending mappings.
        """
        self._tier = tier
        self._keep_last = keep_last
        self._pins = pins or HostPins()
        self._preparing: threading.Thread | None = None

    def save(self, image: Image, facts: Facts, *, protect: Collection[str] = ()) -> StoredPart:
        """Captures and commits a planned state.

        Args:
            image: From :func:`plan`.
            facts: What it is.
            protect: Save ids that retention must not touch.

        Raises:
            MemoryFullError: No room even after retention; what was in memory is still there.
        """
        slot, hashes = self.capture(image, protect=protect)
        part = part_of(image, facts, hashes)
        try:
            stored = self._tier.commit(part, {part.content.files[0].basename: slot})
        except MemoryFullError:
            # The tier has given up the slot as well.
            raise
        except BaseException:
            self._tier.give_back(slot)
            raise
        self._retain(protect)
        self.prepare(image.size)
        return stored

    def capture(
        self,
        image: Image,
        *,
        protect: Collection[str] = (),
        mine: Callable[[StoredPart], bool] | None = None,
        threads: int | None = None,
        hashed: bool = True,
    ) -> tuple[Slot, tuple[str, ...]]:
        """Fills a slot with a planned file.

        Args:
            image: The file.
            protect: Save ids that must not make room for it.
            mine: Which parts may make room; any by default.
            threads: How many threads copy; see :meth:`Image.fill`.
            hashed: Whether to hash it on the way.

        Returns:
            The slot, which is the caller's to commit or to give back, and the hashes of its chunks, or none.

        Raises:
            MemoryFullError: As :meth:`save`.
        """
        self._finish_preparing()
        slot = self._acquire(image.size, protect, mine or _any)
        try:
            return slot, image.fill(slot.view, threads=threads, pin=self._pins.pin, hashed=hashed)
        except BaseException:
            self._tier.give_back(slot)
            raise

    def prepare(self, size: int) -> None:
        """Makes a slot for the next file of this size, behind the caller's back."""
        self._preparing = threading.Thread(target=self._tier.prepare, args=(size,), name="tiered-prepare", daemon=True)
        self._preparing.start()

    def close(self) -> None:
        """Waits for background preparation."""
        self._finish_preparing()

    def _finish_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _acquire(self, size: int, protect: Collection[str], mine: Callable[[StoredPart], bool]) -> Slot:
        try:
            return self._tier.acquire(size)
        except MemoryFullError:
            # The pool has just given up its free slots, so what is missing is known exactly.
            missing = max(1, size + (2 << 20) - self._tier.room())
            victims = retention.make_room(self._held(mine), missing=missing, protect=protect)
            if not victims:
                raise
            self._remove(victims, mine)
            return self._tier.acquire(size)

    def _retain(self, protect: Collection[str]) -> None:
        # Of a sharded checkpoint each rank keeps its own part; see engine/saving/shard_retention.py.
        surplus = retention.surplus(self._held(_is_full), keep_last=self._keep_last, protect=protect)
        self._remove(surplus, _is_full)

    def _held(self, mine: Callable[[StoredPart], bool]) -> list[retention.Held]:
        held: dict[str, retention.Held] = {}
        for stored in self._tier.parts():
            if mine(stored):
                # Ranks of one node may each have a part of the same save.
                others = held.get(stored.save_id, retention.Held(stored.save_id, 0, pending=False))
                size = others.size + stored.part.content.size
                held[stored.save_id] = retention.Held(
                    stored.save_id, size, others.pending or stored.pending, others.replicated or stored.replicated
                )
        return list(held.values())

    def _remove(self, save_ids: Collection[str], mine: Callable[[StoredPart], bool]) -> None:
        for stored in self._tier.parts():
            if stored.save_id in save_ids and mine(stored):
                self._tier.remove(stored)


def _any(_: StoredPart) -> bool:
    return True


def _is_full(stored: StoredPart) -> bool:
    return stored.part.content.kind == "full"


def plan_state(state: Any) -> Image:
    """The image of ``state``; see :func:`tiered_checkpoint_io.formats.image.plan`."""
    return plan(state)


def part_of(image: Image, facts: Facts, hashes: tuple[str, ...]) -> Part:
    """The description of a filled image as one rank's part of a full checkpoint."""
    content = Content(
        save_id=facts.save_id,
        step=facts.step,
        epoch=facts.epoch,
        kind="full",
        created=time.time(),
        world_size=facts.world_size,
        writer=versions(),
        files=(FileEntry(facts.name, image.size, image.chunk_size, hashes),),
        metric=facts.metric,
        resumable=facts.resumable,
    )
    return Part(facts.name, facts.rank, content, facts.dirpath, facts.durable)


def versions() -> dict[str, str]:
    """What a checkpoint says of the software that wrote it."""
    return {
        "tiered_checkpoint_io": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def position(state: Any, name: str) -> tuple[int, int]:
    """The step and the epoch of a state, as it tells them, or else its name; -1 for what neither does."""
    told = state if isinstance(state, dict) else {}
    step = _count(told.get("global_step"))
    return step if step >= 0 else _count(ids.step_in_name(name)), _count(told.get("epoch"))


def _count(value: Any) -> int:
    # What no manifest can hold would leave a checkpoint that nobody can read.
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return value if fits else -1
