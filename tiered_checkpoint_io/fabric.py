"""Checkpoints of a loop with Lightning Fabric: see docs/fabric.md."""

from tiered_checkpoint_io.adapters.fabric import save

__all__ = ["save"]
