"""Dataclasses that commands print with ``--json``: a field is a key, and its text says what the key means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from tiered_checkpoint_io.cli.checking import Checked
from tiered_checkpoint_io.inventory.record import CheckpointInfo, time_of
from tiered_checkpoint_io.model import retention

Event = Literal["listed", "new", "changed", "removed"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change; each line is such a document."""

    event: Annotated[Event, "``listed``: at the first look; the others: since the look before."]
    time: Annotated[datetime, "When this was seen (UTC)."]
    checkpoint: Annotated[CheckpointInfo, "What it is about."]


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a command of ``--exec``."""

    event: Annotated[Literal["ran"], "Tells it from a change."]
    time: Annotated[datetime, "When it ended (UTC)."]
    checkpoint: Annotated[CheckpointInfo, "What it was run for."]
    exit_status: Annotated[int, "Its status; negative, the signal that killed it."]
    duration_s: Annotated[float, "How long it ran."]


@dataclass(frozen=True, slots=True)
class Removed:
    """A checkpoint that was removed from this node."""

    name: Annotated[str, "Its name."]
    dirpath: Annotated[str, "The durable tier that it belongs to."]
    save_id: Annotated[str, "Which save made it."]
    step: Annotated[int | None, "The training step; None where it is not known."]
    parts: Annotated[int, "How many parts this node had."]
    size_bytes: Annotated[int, "Bytes of them."]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A part that was removed, and could not be read."""

    folder: Annotated[Path, "Where it lay."]
    error: Annotated[str, "Why."]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was removed from node memory."""

    root: Annotated[Path, "The memory tier's root."]
    removed: Annotated[Sequence[Removed], "The checkpoints."]
    unreadable: Annotated[Sequence[Unreadable], "Parts that could not be read: removed too, with ``--force``."]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a look at every byte found."""

    dirpath: Annotated[str | None, "As given."]
    intact: Annotated[bool, "Whether nothing is damaged, or needs a newer release."]
    checkpoints: Annotated[Sequence[Checked], "A row for each copy, or part of one."]


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


@dataclass(frozen=True, slots=True)
class Decided:
    """A checkpoint, and whether a policy keeps it."""

    name: Annotated[str, "Its name."]
    kept: Annotated[bool, "Whether it stays."]
    reasons: Annotated[Sequence[str], "What keeps it."]
    step: Annotated[int | None, "The training step; None where it is not known."]
    save_id: Annotated[str, "Which save made it."]
    size_bytes: Annotated[int, "Its bytes."]
    created: Annotated[datetime | None, "When it was saved (UTC)."]
    alias_of: Annotated[str | None, "Of an alias, the name that it stands for."]
    metrics: Annotated[Mapping[str, float], "All values that are known."]
    pins: Annotated[Sequence[Pin], "Its pins, expired ones included."]


@dataclass(frozen=True, slots=True)
class Refused:
    """What the server refused to delete."""

    name: Annotated[str, "The checkpoint."]
    removed: Annotated[bool, "Whether it is gone, and only files of it are left."]
    error: Annotated[str, "What the server said."]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What no policy keeps, and what was removed of it."""

    dirpath: Annotated[str, "The durable tier."]
    dry_run: Annotated[bool, "Whether nothing was to be removed: without ``--yes``."]
    checkpoints: Annotated[Sequence[Decided], "All that are there, the latest save first."]
    unreadable: Annotated[Sequence[str], "Names of checkpoints that can't be read; they stay."]
    removed: Annotated[Sequence[str], "Names of those that were removed."]
    removed_size_bytes: Annotated[int, "Bytes of these."]
    refused: Annotated[Sequence[Refused], "What the server refused to delete."]
    refused_again: Annotated[Sequence[str], "Errors of what earlier prunes left."]
    incomplete_saves: Annotated[Sequence[str], "Ids of saves that no checkpoint has."]
    unnamed_objects: Annotated[int, "How many objects no checkpoint owns."]
    unnamed_size_bytes: Annotated[int, "Bytes of these."]
    unfinished_uploads: Annotated[int, "How many uploads were begun and not ended."]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of what ``doctor`` found."""

    what: Annotated[str, "What was tried: ``memory tier``, ``spill``, ``room``, ``durable tier``, or a request."]
    status: Annotated[Literal["ok", "warn", "fail"], "``warn`` if training begins all the same; ``fail`` if not."]
    measured: Annotated[str, "What was found."]
    do: Annotated[str | None, "What to do; None or empty for nothing."] = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found of this node and its durable tier."""

    dirpath: Annotated[str | None, "The durable tier; None if none is named."]
    memory_dir: Annotated[str, "The memory tier's folder."]
    state_size_bytes: Annotated[int | None, "What was given as ``--state-size``; None for nothing."]
    checks: Annotated[Sequence[Check], "What was found, in order."]
