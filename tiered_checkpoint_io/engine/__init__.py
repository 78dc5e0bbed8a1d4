"""Staging, commit, drain and restore: what the package exists for."""
