"""Checkpoints that others wrote, as committed checkpoints of a durable tier: see :func:`import_checkpoints`."""

from tiered_checkpoint_io.imports.importing import Imported, import_checkpoints

__all__ = ["Imported", "import_checkpoints"]
