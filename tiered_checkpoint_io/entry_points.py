"""What Lightning asks this package for, by the entry points in pyproject.toml.

Every trainer in the environment asks, also one that has nothing of ours: it must not fail for it.
"""

from __future__ import annotations

import sys
from typing import Any


def for_lightning() -> list[Any]:
    """The callbacks that each Trainer of lightning.pytorch gets; none where this package does not work."""
    if sys.platform != "linux":
        return []
    from tiered_checkpoint_io.callbacks.guard import guard

    return list(guard())


def for_pytorch_lightning() -> list[Any]:
    """The callback that each Trainer of pytorch_lightning gets: it refuses what is ours there."""
    if sys.platform != "linux":
        return []
    from tiered_checkpoint_io.other_trainer import OtherTrainerGuard

    return [OtherTrainerGuard()]
