"""Sharded checkpoints through torch.distributed.checkpoint (DCP): ``tiered_checkpoint_io.dcp.save`` and its kin."""

from tiered_checkpoint_io.adapters.dcp import TieredStorageReader, TieredStorageWriter, async_save, load, save

__all__ = ["TieredStorageReader", "TieredStorageWriter", "async_save", "load", "save"]
