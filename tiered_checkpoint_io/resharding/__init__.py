"""Checkpoints written anew as another number of parts: see :func:`reshard_checkpoint`."""

from tiered_checkpoint_io.resharding.reshard import Resharded, reshard_checkpoint

__all__ = ["Resharded", "reshard_checkpoint"]
