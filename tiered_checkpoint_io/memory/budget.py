"""What checkpoints of a namespace may take of this node, and do take, for those who look on.

A sidecar, or a process of the host, is in another cgroup than the trainer: limits that it would find are not the
trainer's, which therefore notes its budget in the memory tier.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from tiered_checkpoint_io.memory.private import write_atomic
from tiered_checkpoint_io.memory.space import used
from tiered_checkpoint_io.memory.tier import MemoryTier

BUDGET_FILE = "budget"


class Space(NamedTuple):
    """Bytes of one root: those of checkpoints, and those that checkpoints may still take. Idle slots are free."""

    used: int
    free: int


def note_budget(tier: MemoryTier) -> None:
    """Notes what the trainer's checkpoints may take; on a tmpfs that is full, nothing is noted."""
    path, text = tier.root / BUDGET_FILE, str(tier.budget).encode()
    with contextlib.suppress(OSError):
        if tier.budget is not None and not (path.exists() and path.read_bytes() == text):
            write_atomic(path, text)


def noted_budget(root: Path) -> int | None:
    """The budget of the last trainer over a memory tier, bytes; None where none was noted."""
    with contextlib.suppress(OSError, ValueError):
        return int((root / BUDGET_FILE).read_bytes())
    return None


def space_of(tier: MemoryTier) -> Space:
    """What a tier has in use and free, of a slot that is being filled as if it were idle; raises OSError."""
    idle = used(tier.root / "slots")
    return Space(max(0, tier.usage() - idle), max(0, tier.room()) + idle)
