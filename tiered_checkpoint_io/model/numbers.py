"""Numbers and names from a caller."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any

from tiered_checkpoint_io.errors import ConfigError


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Returns the hint for an unknown name: the nearest known one, or all of them."""
    plain = {each.replace("_", "").lower(): each for each in known}
    near = difflib.get_close_matches(str(name).replace("_", "").lower(), plain, n=1)
    return f"did you mean {plain[near[0]]!r}?" if near else f"known names: {', '.join(known)}"


def seconds(key: str, value: Any, *, above: float | None = None) -> float:
    """Returns a given time in seconds: from 0 on, maybe infinite, or finite and ``above`` a number.

    Raises:
        ConfigError: The value is no such number. A wait of nan seconds would never end.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    good = is_number and (value >= 0 if above is None else above < value < math.inf)
    if not good:
        allowed = "a number of seconds, from 0 on" if above is None else f"a number of seconds above {above:g}"
        raise ConfigError(f"{key} is {value!r}", hint=f"allowed: {allowed}")
    return float(value)
