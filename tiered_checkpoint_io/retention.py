"""What the durable tier keeps: policies, pins, and metrics that an evaluation adds. See docs/retention.md.

``options`` are keys of the configuration that say how to reach the durable tier, such as ``endpoint_url``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from tiered_checkpoint_io.engine.durable import metrics as _metrics
from tiered_checkpoint_io.engine.durable import pins as _pins
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.retention import Best, EveryHours, EverySteps, Latest, Pin
from tiered_checkpoint_io.stores import Store, open_store

__all__ = [
    "Best",
    "EveryHours",
    "EverySteps",
    "Latest",
    "Pin",
    "add_metrics",
    "pin",
    "pins",
    "unpin",
]


def add_metrics(
    dirpath: str | os.PathLike[str], name: str | os.PathLike[str], metrics: Mapping[str, float], **options: Any
) -> None:
    """Adds values to a checkpoint that is on the durable tier, as an evaluation elsewhere finds them.

    Policies of the best, and ``tiered://best?...``, go by them; a later save of the same name has none of them.

    Args:
        dirpath: The durable tier.
        name: The checkpoint: a name, or a path or URL below dirpath.
        metrics: Finite numbers, by the names of their metrics; one of the same name replaces the earlier.
        options: See the head of this module.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint. Nothing was added.
        ConfigError: A name, value or option is not allowed. Nothing was added.
        StoreError: The tier could not be asked. Repeat the call to finish.
    """
    with _opened(dirpath, options) as store:
        _metrics.add_metrics(store, _name(store, name), metrics)


def pin(
    dirpath: str | os.PathLike[str],
    name: str | os.PathLike[str],
    *,
    reason: str = "",
    expires_s: float | None = None,
    **options: Any,
) -> Pin:
    """Keeps a checkpoint from being deleted by retention, prune, save_top_k or a callback.

    Args:
        dirpath: The durable tier.
        name: The checkpoint: a name, or a path or URL below dirpath. For an alias, what that stands for now.
        reason: Why, for people.
        expires_s: For how long, seconds; None until it is removed.
        options: See the head of this module.

    Raises:
        CheckpointNotFoundError: There is none. Nothing is pinned.
        UsageError: It is a copy, as ``last.ckpt``, which the next save replaces.
        ConfigError: A value or option is not allowed.
        StoreError: The tier could not be asked.
    """
    with _opened(dirpath, options) as store:
        return _pins.pin(store, _name(store, name), reason=reason, expires_s=expires_s)


def unpin(
    dirpath: str | os.PathLike[str], name: str | os.PathLike[str], token: str | None = None, **options: Any
) -> list[Pin]:
    """Removes the pins of a checkpoint; deletes nothing else.

    Args:
        dirpath: The durable tier.
        name: The checkpoint, as :func:`pin` takes it.
        token: Of the one pin to remove; None for all of the checkpoint.
        options: See the head of this module.

    Returns:
        The pins that are gone.

    Raises:
        ConfigError: An option is not allowed.
        StoreError: The tier could not be asked.
    """
    with _opened(dirpath, options) as store:
        return _pins.unpin(store, _name(store, name), token)


def pins(dirpath: str | os.PathLike[str], **options: Any) -> dict[str, list[Pin]]:
    """All pins that hold.

    Args:
        dirpath: The durable tier.
        options: See the head of this module.

    Returns:
        The pins, by the names of their checkpoints.

    Raises:
        ConfigError: An option is not allowed.
        StoreError: The tier could not be asked.
    """
    with _opened(dirpath, options) as store:
        return _pins.pins(store)


def _opened(dirpath: str | os.PathLike[str], options: Mapping[str, Any]) -> contextlib.closing[Store]:
    return contextlib.closing(open_store(TieredCheckpointConfig.from_any(dirpath=dirpath, **options)))


def _name(store: Store, name: str | os.PathLike[str]) -> str:
    return ids.name_in(store.url, name)
