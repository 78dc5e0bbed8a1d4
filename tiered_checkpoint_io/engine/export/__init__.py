"""Sharded checkpoints as ordinary files."""
