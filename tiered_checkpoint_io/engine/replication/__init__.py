"""Copies in the memory of other nodes."""
