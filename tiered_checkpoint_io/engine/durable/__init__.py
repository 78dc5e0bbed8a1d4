"""Checkpoints of the durable tier: how they are written, deleted and read."""
