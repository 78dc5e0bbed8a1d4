"""Policies of retention on the durable tier: docs/operations.md."""

from tiered_checkpoint_io.model.retention import Best, EverySteps, Latest

__all__ = ["Best", "EverySteps", "Latest"]
