"""Dataclasses that commands print with ``--json``: a field is a key, and its text says what the key means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from tiered_checkpoint_io.inventory.record import time_of
from tiered_checkpoint_io.model import retention


@dataclass(frozen=True, slots=True)
class Pin:
    """What keeps a checkpoint from being deleted."""

    name: Annotated[str, "The checkpoint."]
    token: Annotated[str, "The pin itself: a checkpoint may have several."]
    save_id: Annotated[str, "What had the name when it was pinned."]
    reason: Annotated[str, "Why, for people; may be empty."]
    host: Annotated[str, "Where it was pinned."]
    created: Annotated[datetime | None, "When (UTC)."]
    expires: Annotated[datetime | None, "From when on it counts no more; None for never."]

    @classmethod
    def of(cls, pin: retention.Pin) -> Pin:
        """A pin, for programs."""
        ends = time_of(pin.expires) if pin.expires is not None else None
        return cls(pin.name, pin.token, pin.save_id, pin.reason, pin.host, time_of(pin.created), ends)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin that was made."""

    dirpath: Annotated[str, "The durable tier."]
    pin: Annotated[Pin, "The pin."]


@dataclass(frozen=True, slots=True)
class Unpinned:
    """Pins that were removed."""

    dirpath: Annotated[str, "The durable tier."]
    removed: Annotated[Sequence[Pin], "The pins."]


@dataclass(frozen=True, slots=True)
class MetricsAdded:
    """Metrics that a checkpoint was given."""

    dirpath: Annotated[str, "The durable tier."]
    name: Annotated[str, "The checkpoint."]
    save_id: Annotated[str, "The save that they belong to."]
    metrics: Annotated[Mapping[str, float], "Their values."]
