"""Checkpoints through node memory and S3 for PyTorch Lightning and NeMo.

The public names are resolved on first use, so that the command line and the drain, which need
neither torch nor Lightning, never pay for importing them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
    from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
    from tiered_checkpoint_io.adapters.lightning import AsyncCheckpointIO, TieredCheckpointIO
    from tiered_checkpoint_io.callbacks.model_checkpoint import from_config
    from tiered_checkpoint_io.engine.ranks.coordination import train_here
    from tiered_checkpoint_io.inventory.api import (
        CheckpointInfo,
        find_latest,
        list_checkpoints,
        new_checkpoints,
        wait_for,
    )
    from tiered_checkpoint_io.model.config import TieredCheckpointConfig
    from tiered_checkpoint_io.model.ids import build_s3_url, is_s3_url, parse_s3_url
    from tiered_checkpoint_io.version import __version__

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointInfo",
    "TieredCheckpointConfig",
    "TieredCheckpointIO",
    "TieredStorageReader",
    "TieredStorageWriter",
    "__version__",
    "build_s3_url",
    "find_latest",
    "from_config",
    "is_s3_url",
    "list_checkpoints",
    "new_checkpoints",
    "parse_s3_url",
    "train_here",
    "wait_for",
]

_HOMES = {
    "AsyncCheckpointIO": "tiered_checkpoint_io.adapters.lightning",
    "TieredCheckpointIO": "tiered_checkpoint_io.adapters.lightning",
    "TieredCheckpointConfig": "tiered_checkpoint_io.model.config",
    "TieredStorageReader": "tiered_checkpoint_io.adapters.dcp_reader",
    "TieredStorageWriter": "tiered_checkpoint_io.adapters.dcp_writer",
    "from_config": "tiered_checkpoint_io.callbacks.model_checkpoint",
    "CheckpointInfo": "tiered_checkpoint_io.inventory.api",
    "find_latest": "tiered_checkpoint_io.inventory.api",
    "list_checkpoints": "tiered_checkpoint_io.inventory.api",
    "new_checkpoints": "tiered_checkpoint_io.inventory.api",
    "wait_for": "tiered_checkpoint_io.inventory.api",
    "build_s3_url": "tiered_checkpoint_io.model.ids",
    "is_s3_url": "tiered_checkpoint_io.model.ids",
    "parse_s3_url": "tiered_checkpoint_io.model.ids",
    "train_here": "tiered_checkpoint_io.engine.ranks.coordination",
    "__version__": "tiered_checkpoint_io.version",
}


# A type checker would take any name for one of ours.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
