"""Which arguments a caller has named, and whether they can be taken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from tiered_checkpoint_io.errors import ConfigError

_P = ParamSpec("_P")


def noting_what_is_given(init: Callable[_P, None]) -> Callable[_P, None]:
    """Has an object know, as ``_given``, which keys its caller named: one that is named counts, even as the default."""

    @functools.wraps(init)
    def wrapped(*args: _P.args, **given: _P.kwargs) -> None:
        vars(args[0])["_given"] = frozenset(given)
        init(*args, **given)

    return wrapped


def check_positive(key: str, value: object) -> None:
    """Refuses what is neither a whole number from 1 nor None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{key} is {value!r}", hint="allowed: a whole number from 1, or None")
