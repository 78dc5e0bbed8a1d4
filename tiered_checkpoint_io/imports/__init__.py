"""Checkpoints that others wrote, as committed checkpoints of a durable tier: see :mod:`importing`."""
