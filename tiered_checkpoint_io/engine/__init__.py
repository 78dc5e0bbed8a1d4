"""Staging, commit, drain and restore: what the package exists for."""

# It refuses other systems than Linux, by name: before anything here imports what these lack.
import tiered_checkpoint_io.errors  # noqa: F401
