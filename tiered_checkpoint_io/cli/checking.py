"""What a look at copies of checkpoints finds, and the look at those in memory: it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

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
    state: CopyState
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
            "step": ids.known(self.step),
            **{key: document[key] or None for key in ("copy", "file", "error")},
        }


# --------------------------------------------------------------------------------------- memory
def check_part(tier: MemoryTier, stored: StoredPart, meter: Meter) -> Checked:
    """Reads a part in memory; one that was removed meanwhile is not damaged."""
    part = stored.part
    copy = "replica" if stored.is_replica else "spill" if tier.is_spilled(stored.folder) else "own"

    def checked(state: CopyState, file: str = "", error: str = "") -> Checked:
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
        for folder, error in tier.unreadable()
    ]


Report = Callable[[Checked], None]
