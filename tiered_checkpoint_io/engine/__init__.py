"""The core of the package: staging, commit, drain and restore."""

# First: this module refuses systems other than Linux before a missing module fails an import.
import tiered_checkpoint_io.errors  # noqa: F401
