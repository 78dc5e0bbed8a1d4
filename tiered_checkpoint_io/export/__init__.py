"""Checkpoints as files for others: see :func:`export_checkpoint`."""

from tiered_checkpoint_io.export.checkpoint import export_checkpoint

__all__ = ["export_checkpoint"]
