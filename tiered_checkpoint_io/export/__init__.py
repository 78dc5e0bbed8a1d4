"""Checkpoints as files for other programs; internal: ``tiered-ckpt get`` is its front."""

from tiered_checkpoint_io.export.checkpoint import export_checkpoint

__all__ = ["export_checkpoint"]
