"""The bytes of checkpoint files: their layout, planned without copying, and how they are filled and read."""
