"""What a look at copies of checkpoints finds, and the look at those in memory: it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from tiered_checkpoint_io.cli.progress import Meter
from tiered_checkpoint_io.engine.chunks import verify
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
)
from tiered_checkpoint_io.memory.parts import StoredPart, reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

CopyState = Literal["intact", "damaged", "newer", "changed"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a look at one copy of a checkpoint, or at one part of it, found."""

    name: Annotated[str, "The checkpoint's; of what can't be read, the folder or key."]
    tier: Annotated[Literal["memory", "durable"], "Where it lies."]
    state: Annotated[
        CopyState, "``newer``: it needs a newer release; ``changed``: removed or overwritten while it was read."
    ]
    rank: Annotated[int | None, "Whose part it is, or the damaged file's; None for all of them."] = None
    copy: Annotated[Literal["own", "replica", "spill"] | None, "What it is in memory."] = None
    file: Annotated[str | None, "The damaged file."] = None
    error: Annotated[str | None, "What is wrong."] = None
    step: Annotated[int | None, "The training step; None where it is not known."] = None
    size_bytes: Annotated[int, "Bytes of it."] = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.state in ("intact", "changed")


# --------------------------------------------------------------------------------------- memory
def check_part(tier: MemoryTier, stored: StoredPart, meter: Meter) -> Checked:
    """Reads a part in memory; one that was removed meanwhile is not damaged."""
    part = stored.part
    copy: Literal["own", "replica", "spill"] = (
        "replica" if stored.is_replica else "spill" if tier.is_spilled(stored.folder) else "own"
    )

    def checked(state: CopyState, file: str | None = None, error: str | None = None) -> Checked:
        step, size = ids.known(part.content.step), part.content.size
        return Checked(part.name, "memory", state, part.rank, copy, file, error, step, size)

    try:
        with reading(stored) as views:
            for entry in part.content.files:
                where = str(stored.file(entry.basename))
                verify(entry, views[entry.basename], where=where, progress=meter.add)
    except CheckpointNotFoundError:
        return checked("changed")
    except CorruptCheckpointError as error:
        return checked("damaged", error.key, error.message)
    return checked("intact")


def unreadable(tier: MemoryTier) -> list[Checked]:
    """What lies in memory and can't be understood."""
    return [
        Checked(
            str(folder), "memory", "newer" if isinstance(error, FormatVersionError) else "damaged", error=str(error)
        )
        for folder, error in tier.unreadable()
    ]


Report = Callable[[Checked], None]
