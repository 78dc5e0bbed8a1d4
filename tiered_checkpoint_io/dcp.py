"""Checkpoints of a job's ranks: ``tiered_checkpoint_io.dcp.save`` and its kin."""

from tiered_checkpoint_io.adapters.dcp import (
    AsyncSave,
    TieredStorageReader,
    TieredStorageWriter,
    async_save,
    load,
    maybe_finalize_async_calls,
    save,
    save_full,
)

__all__ = [
    "AsyncSave",
    "TieredStorageReader",
    "TieredStorageWriter",
    "async_save",
    "load",
    "maybe_finalize_async_calls",
    "save",
    "save_full",
]
