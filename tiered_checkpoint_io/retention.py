"""Policies of what the durable tier keeps. See docs/retention.md."""

from tiered_checkpoint_io.model.retention import Best, EverySteps, Latest

__all__ = ["Best", "EverySteps", "Latest"]
