"""The roots of memory tiers on this node, as commands know them."""

from tiered_checkpoint_io.inventory.roots import all_roots, existing, last_config, tier_at, undone

__all__ = ["all_roots", "existing", "last_config", "tier_at", "undone"]
