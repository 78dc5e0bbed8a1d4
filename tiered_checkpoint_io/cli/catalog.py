"""What a durable tier holds, as commands know it."""

from tiered_checkpoint_io.inventory.durable import Found, checkpoints, latest, newer, read, read_all

__all__ = ["Found", "checkpoints", "latest", "newer", "read", "read_all"]
