"""Which arguments a caller has named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

_P = ParamSpec("_P")


def noting_what_is_given(init: Callable[_P, None]) -> Callable[_P, None]:
    """Has an object know, as ``_given``, which keys its caller named: one that is named counts, even as the default."""

    @functools.wraps(init)
    def wrapped(*args: _P.args, **given: _P.kwargs) -> None:
        vars(args[0])["_given"] = frozenset(given)
        init(*args, **given)

    return wrapped
