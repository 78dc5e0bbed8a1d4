"""A machine that is lost, memory and all."""

import shutil
import time
from pathlib import Path

_PATIENCE_S = 20


def lose_memory(folder):
    """Removes all that a machine has in memory; a drain that is about to end may still write there meanwhile."""
    end = time.monotonic() + _PATIENCE_S
    while Path(folder).exists():
        assert time.monotonic() < end, f"something writes to {folder} all the time"
        shutil.rmtree(folder, ignore_errors=True)
