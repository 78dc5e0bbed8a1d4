"""Lightning's sharded strategies over both tiers."""

from tiered_checkpoint_io.adapters.strategies import TieredFSDPStrategy, TieredModelParallelStrategy

__all__ = ["TieredFSDPStrategy", "TieredModelParallelStrategy"]
