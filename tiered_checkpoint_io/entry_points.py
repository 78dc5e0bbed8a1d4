"""The entry point in pyproject.toml by which Lightning asks this package for callbacks.

Every trainer in the environment asks. A trainer without our classes gets no callback, and imports only this module.
"""

from __future__ import annotations

import sys
from typing import Any

#: A checkpoint IO of ours is made before its trainer is, and so are our callbacks: then this is imported.
_IO = "tiered_checkpoint_io.adapters.lightning"


def for_lightning() -> list[Any]:
    """Returns the callback that looks after a Trainer of lightning.pytorch, if the trainer may have our IO."""
    if _IO not in sys.modules:
        return []
    from tiered_checkpoint_io.callbacks.guard import StrategyGuard

    return [StrategyGuard()]
