"""Compares what lies in the tiers with its hashes: in parallel, in pieces, and changing nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tiered_checkpoint_io.cli.answers import moving
from tiered_checkpoint_io.cli.progress import Meter
from tiered_checkpoint_io.engine.chunks import PIECE_SIZE, fetch_pieces, verify
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    ManifestError,
    StoreNotFoundError,
)
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.memory.parts import StoredPart, reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.manifest import FileEntry, Manifest
from tiered_checkpoint_io.stores import Store

State = Literal["intact", "damaged", "newer", "changed"]

#: Chunks of a file that are read at once.
_READS = 8


@dataclass(frozen=True, slots=True)
class Checked:
    """What a look at one copy of a checkpoint, or at one part of it, found.

    Attributes:
        name: The checkpoint's; of what can't be read, the folder or key.
        tier: Where it lies.
        state: ``newer``: it needs a newer release; ``changed``: removed or overwritten while it was read.
        rank: Whose part it is, or the damaged file's; None for all of them.
        copy: In memory: ``own``, ``replica`` or ``spill``; else "".
        file: The damaged file.
        error: What is wrong.
        step: The training step; -1 where it is not known.
        size_bytes: Bytes of it.
    """

    name: str
    tier: Literal["memory", "durable"]
    state: State
    rank: int | None = None
    copy: str = ""
    file: str = ""
    error: str = ""
    step: int = -1
    size_bytes: int = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.state in ("intact", "changed")

    def to_json(self) -> dict[str, Any]:
        """Its document; what is not known is null."""
        document = asdict(self)
        return document | {
            "step": self.step if self.step >= 0 else None,
            **{key: document[key] or None for key in ("copy", "file", "error")},
        }


@dataclass(frozen=True, slots=True)
class Damage:
    """The first damage of a content; ``rank`` and ``file`` where it is in a file."""

    error: str
    rank: int | None = None
    file: str = ""


# --------------------------------------------------------------------------------------- memory
def held_in(tier: MemoryTier) -> list[StoredPart]:
    """All parts of a memory tier: its own, those in the spill, and replicas."""
    return [*tier.parts(), *tier.replicas.parts()]


def check_part(tier: MemoryTier, stored: StoredPart, meter: Meter) -> Checked:
    """Reads a part in memory; one that was removed meanwhile is not damaged."""
    part = stored.part
    copy = "replica" if stored.is_replica else "spill" if tier.is_spilled(stored.folder) else "own"

    def checked(state: State, file: str = "", error: str = "") -> Checked:
        step, size = part.content.step, part.content.size
        return Checked(part.name, "memory", state, part.rank, copy, file, error, step, size)

    try:
        with reading(stored) as views:
            for entry in part.content.files:
                where = str(stored.file(entry.basename))
                verify(entry, views[entry.basename], where=where, progress=meter.add)
    except CheckpointNotFoundError:
        return checked("changed")
    except CorruptCheckpointError as error:
        return checked("damaged", error.key or "", error.message)
    return checked("intact")


def unreadable(tier: MemoryTier) -> list[Checked]:
    """What lies in memory and can't be understood."""
    return [
        Checked(
            str(folder), "memory", "newer" if isinstance(error, FormatVersionError) else "damaged", error=str(error)
        )
        for folder, error in (*tier.damaged(), *tier.replicas.damaged())
    ]


# -------------------------------------------------------------------------------------- durable
def damage_of(store: Store, manifest: Manifest, meter: Meter) -> Damage | None:
    """What is wrong with a checkpoint whose bytes match none of its contents; else None.

    Raises:
        StoreError: The tier could not be asked, which says nothing of the checkpoint.
    """
    first: Damage | None = None
    for content in (manifest.content, *manifest.previous):
        try:
            files = files_of(store, content)
            # Of one part, all files are its coordinator's.
            alone = content.parts == 1
            ranks = [max(content.coordinator, 0)] if alone else range(content.parts)
            owners = {entry.path: rank for rank in ranks for entry in files.of_rank(rank)}
            found = _first_damage(store, files.all(), owners, meter)
        except (CorruptCheckpointError, ManifestError, StoreNotFoundError) as error:
            found = Damage(error.message, file=error.key or "")
        if found is None:
            return None
        first = first or found
    return first


def _first_damage(store: Store, entries: Collection[FileEntry], owners: dict[str, int], meter: Meter) -> Damage | None:
    heard, damaged = moving(), set[str]()

    def one(job: tuple[FileEntry, int]) -> str:
        entry, index = job
        if entry.path in damaged:
            return ""
        try:
            if index == 0 and (size := store.size(entry.path)) != entry.size:
                return f"{size} bytes in place of {entry.size}"
            _check_chunk(store, entry, index, heard, meter)
        except (CorruptCheckpointError, StoreNotFoundError) as error:
            damaged.add(entry.path)
            return error.message
        return ""

    jobs = [(entry, index) for entry in entries for index in range(len(entry.hashes))]
    for (entry, _), error in zip(jobs, in_parallel(one, jobs, _READS), strict=True):
        if error:
            return Damage(error, owners.get(entry.path), f"{store.url}/{entry.path}")
    return None


def _check_chunk(store: Store, entry: FileEntry, index: int, heard: Callable[[], None], meter: Meter) -> None:
    length = entry.chunks[index][1]
    # It is read to be compared alone, each piece over the one before.
    aside = memoryview(bytearray(min(length, PIECE_SIZE)))
    pieces = [aside[: length - at] for at in range(0, length, PIECE_SIZE)]
    if length:
        # A slow line takes longer for a chunk than a silence may last.
        fetch_pieces(store, entry, index, pieces, lambda _: heard())
    meter.add(length)


Report = Callable[[Checked], None]
