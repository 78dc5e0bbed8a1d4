"""Dataclasses that commands print with ``--json``: a field is a key, and its text says what the key means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from tiered_checkpoint_io.cli.checking import Checked
from tiered_checkpoint_io.engine.drain import operations
from tiered_checkpoint_io.inventory.details import File, PartHere
from tiered_checkpoint_io.inventory.record import CheckpointInfo, Tier, time_of
from tiered_checkpoint_io.metrics import catalog
from tiered_checkpoint_io.model import retention

Event = Literal["listed", "new", "changed", "removed"]
FlushState = Literal["durable", "uploaded", "queued", "not_durable"]


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
class Exported:
    """The files that were written."""

    files: Annotated[Sequence[File], "The files."]


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
class Outcome:
    """What became of an operation on the durable tier."""

    action: Annotated[operations.Action, "What it was."]
    name: Annotated[str, "The checkpoint."]
    dirpath: Annotated[str, "The durable tier."]
    step: Annotated[int | None, "The training step; None where it is not known."]
    outcome: Annotated[operations.OutcomeState, "What became of it."]
    error: Annotated[str | None, "What went wrong."]
    size_bytes: Annotated[int, "Bytes of the checkpoint, or of this node's part of it."]
    duration_s: Annotated[float, "From its start to its end."]
    finished: Annotated[datetime | None, "When it ended (UTC)."]
    attempts: Annotated[int, "How often it was tried."]


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain has done."""

    root: Annotated[Path, "The memory tier's root."]
    operations_left: Annotated[int, "What is still to do: with any the status is 1, as with a failed outcome."]
    outcomes: Annotated[Sequence[Outcome], "What was done, in the order of the operations."]


@dataclass(frozen=True, slots=True)
class Damaged:
    """A part that can't be read."""

    folder: Annotated[Path, "Where it lies."]
    tier: Annotated[Tier, "Which memory."]
    error: Annotated[str, "Why."]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An operation that waits for the durable tier."""

    action: Annotated[operations.Action, "What it is."]
    name: Annotated[str, "The checkpoint."]
    target: Annotated[str | None, "Of an alias or a copy, the name that it is to stand for."]
    dirpath: Annotated[str, "The durable tier; empty where it is not known."]
    server: Annotated[str | None, "The endpoint of that, as of a part."]


@dataclass(frozen=True, slots=True)
class DrainState:
    """What the drain last said of itself."""

    pid: Annotated[int | None, "Its process; None where none has run."]
    last_seen: Annotated[datetime | None, "When it last said so (UTC)."]
    name: Annotated[str | None, "The checkpoint in work."]
    done_bytes: Annotated[int, "Bytes of it that are on the durable tier."]
    total_bytes: Annotated[int, "Bytes of it."]
    rate_bytes_per_s: Annotated[float, "Of the current, or else of the last, upload."]
    last_error: Annotated[str | None, "The newest failure; null once nothing that failed is left."]


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of this node's memory."""

    namespace: Annotated[str, "Its name."]
    root: Annotated[Path, "Where it lies."]
    dirpath: Annotated[str | None, "The durable tier of its last trainer; None where none has named one yet."]
    server: Annotated[str | None, "The endpoint of that, as of a part."]
    parts: Annotated[Sequence[PartHere], "The parts in memory, and those kept for other nodes."]
    damaged: Annotated[Sequence[Damaged], "Parts that can't be read."]
    waiting: Annotated[Sequence[Waiting], "Operations that wait for the durable tier, in order."]
    outcomes: Annotated[Sequence[Outcome], "The last operations on the durable tier, in order."]
    drain: Annotated[DrainState, "What the drain last said of itself."]


@dataclass(frozen=True, slots=True)
class Status:
    """This node's memory, one namespace after the other."""

    namespaces: Annotated[Sequence[Namespace], "The namespaces."]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a look at every byte found."""

    dirpath: Annotated[str | None, "As given."]
    intact: Annotated[bool, "Whether nothing is damaged, or needs a newer release."]
    checkpoints: Annotated[Sequence[Checked], "A row for each copy, or part of one."]


@dataclass(frozen=True, slots=True)
class FlushedSave:
    """What became of a save of which this node has parts."""

    name: Annotated[str, "The checkpoint."]
    dirpath: Annotated[str, "Its durable tier."]
    step: Annotated[int | None, "The training step; None where it is not known."]
    state: Annotated[
        FlushState,
        "``uploaded``: all that this node has of it; other nodes have not sent all of it yet.",
    ]
    ranks: Annotated[Sequence[int], "Whose parts this node has."]
    missing_ranks: Annotated[Sequence[int], "Whose parts it has not."]
    size_bytes: Annotated[int, "Bytes of the parts that it has."]
    error: Annotated[str | None, "Why it is not durable."]


@dataclass(frozen=True, slots=True)
class Flushed:
    """What was uploaded of this node's memory."""

    namespace: Annotated[str, "The namespace."]
    flushed: Annotated[bool, "Whether all was uploaded that could be; not where ``--ended`` left it to a trainer."]
    checkpoints: Annotated[Sequence[FlushedSave], "The checkpoints."]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A checkpoint that was fetched from the durable tier."""

    name: Annotated[str, "Its name."]
    dirpath: Annotated[str, "The durable tier."]
    step: Annotated[int | None, "The training step; None where it is not known."]
    namespace: Annotated[str | None, "In whose memory it is now; None with ``--to``."]
    folder: Annotated[Path | None, "The folder of ``--to``; None without."]
    ranks: Annotated[Sequence[int], "Whose parts."]
    fetched_size_bytes: Annotated[int, "Bytes that were read; 0 where memory had it already, intact."]


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
class Metric:
    """A value of a metric."""

    name: Annotated[str, "Its full name."]
    type: Annotated[catalog.Kind, "A counter only grows; a gauge is a value of now."]
    unit: Annotated[catalog.Unit, "Of its value; empty for a plain number."]
    labels: Annotated[Mapping[str, str], "What tells its values apart."]
    value: Annotated[float, "The value."]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of this node's memory tiers."""

    metrics: Annotated[Sequence[Metric], "Their values."]


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
