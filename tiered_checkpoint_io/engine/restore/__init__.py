"""Restore: the choice of a checkpoint, and the reading of its bytes to their targets."""
