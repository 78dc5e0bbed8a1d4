"""Lightning callbacks over the tiers."""

from tiered_checkpoint_io.adapters.steps import tiers_for_step
from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted, PreemptionCheckpoint

__all__ = ["Preempted", "PreemptionCheckpoint", "TieredModelCheckpoint", "tiers_for_step"]
