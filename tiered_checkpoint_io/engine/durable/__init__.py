"""Checkpoints of the durable tier: writes, deletes and reads."""
