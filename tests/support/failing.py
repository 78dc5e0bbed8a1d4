"""Expects an error of this package by its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tiered_checkpoint_io.errors import Reason, TieredCheckpointError


@contextlib.contextmanager
def failing(
    reason: Reason | None, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[TieredCheckpointError]]:
    """Expects the block to raise an error with this reason; ``match`` is a pattern of its text."""
    with pytest.raises(TieredCheckpointError, match=match) as caught:
        yield caught
    assert caught.value.reason == reason, caught.value
