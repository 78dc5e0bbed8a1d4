"""What dead processes left in a memory tier, and its clearing."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.memory.parts import REPLICAS, SAVES, clear_half_made
from tiered_checkpoint_io.memory.slots import clean_dead


def clear_dead(root: Path, clock: Clock) -> None:
    """Clears what dead processes left below a tier's root: their free slots, trash and half-made folders."""
    clean_dead(str(root / "slots"))
    for entry in os.scandir(root / "trash"):
        # Renamed first: a live remover must not see its folder without the marker that tells
        # it not to reuse the files.
        doomed = root / "trash" / f"clean.{os.getpid()}.{clock.token(4)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry.path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    for name in (SAVES, REPLICAS):
        clear_half_made(root / name, clock)
