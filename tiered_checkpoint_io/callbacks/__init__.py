"""Lightning callbacks over the tiers."""

from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import PreemptionCheckpoint

__all__ = ["PreemptionCheckpoint", "TieredModelCheckpoint"]
