"""Saves of several ranks."""
