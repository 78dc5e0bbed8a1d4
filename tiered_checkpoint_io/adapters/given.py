"""Arguments that a caller gave, and whether they can be taken."""

from __future__ import annotations

from tiered_checkpoint_io.errors import ConfigError


def check_positive(key: str, value: object) -> None:
    """Refuses what is neither a whole number from 1 nor None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{key} is {value!r}", hint="allowed: a whole number from 1, or None")
