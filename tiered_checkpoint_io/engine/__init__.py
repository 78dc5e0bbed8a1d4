"""Staging, commit, drain and restore: what the package exists for."""

# First: this module refuses systems other than Linux before a missing module fails an import.
import tiered_checkpoint_io.errors  # noqa: F401
