"""What commands print with ``--json``; :mod:`schema` makes their schemas of these dataclasses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from tiered_checkpoint_io.engine.drain import operations
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.inventory.details import File, PartHere, Save, parts_here
from tiered_checkpoint_io.inventory.node import held_part, tier_of
from tiered_checkpoint_io.inventory.record import CheckpointInfo, Tier, time_of
from tiered_checkpoint_io.inventory.roots import tier_at
from tiered_checkpoint_io.model import ids

Event = Literal["listed", "new", "changed", "removed"]


@dataclass(frozen=True, slots=True)
class Listed:
    """The checkpoints of both tiers."""

    dirpath: Annotated[str | None, "The durable tier; None where only this node's memory was looked at."]
    durable_error: Annotated[str | None, "Why the durable tier could not be asked; then the status is 1."]
    checkpoints: Annotated[Sequence[CheckpointInfo], "The latest save first."]


@dataclass(frozen=True, slots=True)
class Shown:
    """All that is known of the checkpoints of one name."""

    name: Annotated[str, "The name that was asked for."]
    durable_error: Annotated[str | None, "As in ``ls``."]
    saves: Annotated[Sequence[Save], "Its saves, the latest first: memory may have a later one than the durable tier."]


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
class Cleaned:
    """What was removed from node memory."""

    root: Annotated[Path, "The memory tier's root."]
    removed: Annotated[Sequence[Removed], "The checkpoints."]


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
    last_error: Annotated[str | None, "The newest failure."]


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


#: By command; of ``watch`` each line is one of the two.
DOCUMENTS: Mapping[str, tuple[type, ...]] = {
    "clean": (Cleaned,),
    "drain": (Drained,),
    "export": (Exported,),
    "ls": (Listed,),
    "show": (Shown,),
    "status": (Status,),
    "watch": (Change, Ran),
}


def drain_document(root: Path, before: Collection[operations.Outcome], left: int) -> Drained:
    """What a drain has done since there were the outcomes ``before``, and how many operations are left."""
    return Drained(root, left, [_outcome(each) for each in Queue(root).outcomes() if each not in before])


def namespace_document(root: Path) -> Namespace:
    """What lies in the memory of one namespace, what waits, and what the drain says of itself."""
    tier, queue = tier_at(root), Queue(root)
    outcomes, progress = queue.outcomes(), queue.progress()
    return Namespace(
        namespace=root.name,
        root=root,
        dirpath=tier.place.dirpath if tier.place is not None else None,
        server=(tier.place.endpoint or None) if tier.place is not None else None,
        parts=parts_here([held_part(tier, each, outcomes) for each in tier.held()]),
        damaged=[Damaged(folder, tier_of(tier, folder), str(error)) for folder, error in tier.unreadable()],
        waiting=[
            Waiting(each.action, each.name, each.target or None, each.dirpath, each.place.endpoint or None)
            for each in queue.look(tier)
        ],
        outcomes=[_outcome(each) for each in outcomes],
        drain=DrainState(
            pid=progress.pid or None,
            last_seen=time_of(progress.heartbeat) if progress.pid else None,
            name=progress.name or None,
            done_bytes=progress.bytes_done,
            total_bytes=progress.bytes_total,
            rate_bytes_per_s=progress.rate,
            last_error=progress.last_error or None,
        ),
    )


def _outcome(each: operations.Outcome) -> Outcome:
    return Outcome(
        action=each.action,
        name=each.name,
        dirpath=each.dirpath,
        step=ids.known(each.step),
        outcome=each.state,
        error=each.error or None,
        size_bytes=each.bytes,
        duration_s=each.seconds,
        finished=time_of(each.finished),
        attempts=each.attempts,
    )
