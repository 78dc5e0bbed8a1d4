"""Checkpoints of a job's ranks: ``tiered_checkpoint_io.dcp.save`` and the other functions."""

from tiered_checkpoint_io.adapters.calls import maybe_finalize_async_calls
from tiered_checkpoint_io.adapters.dcp import async_save, load, save
from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter

__all__ = ["TieredStorageReader", "TieredStorageWriter", "async_save", "load", "maybe_finalize_async_calls", "save"]
