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
    from tiered_checkpoint_io.inventory.api import find_latest, list_checkpoints, new_checkpoints
    from tiered_checkpoint_io.version import __version__

__all__ = [
    "AsyncCheckpointIO",
    "TieredCheckpointIO",
    "TieredStorageReader",
    "TieredStorageWriter",
    "__version__",
    "find_latest",
    "from_config",
    "list_checkpoints",
    "new_checkpoints",
]

_HOMES = {
    "AsyncCheckpointIO": "tiered_checkpoint_io.adapters.lightning",
    "TieredCheckpointIO": "tiered_checkpoint_io.adapters.lightning",
    "TieredStorageReader": "tiered_checkpoint_io.adapters.dcp_reader",
    "TieredStorageWriter": "tiered_checkpoint_io.adapters.dcp_writer",
    "from_config": "tiered_checkpoint_io.callbacks.model_checkpoint",
    "find_latest": "tiered_checkpoint_io.inventory.api",
    "list_checkpoints": "tiered_checkpoint_io.inventory.api",
    "new_checkpoints": "tiered_checkpoint_io.inventory.api",
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
