"""Which run may write to a place."""
