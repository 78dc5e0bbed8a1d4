"""Checkpoints as rows of a table, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from tiered_checkpoint_io.cli.output import is_terminal
from tiered_checkpoint_io.inventory.node import PartState
from tiered_checkpoint_io.inventory.record import CheckpointInfo, CheckpointState
from tiered_checkpoint_io.logs import size_text

COLUMNS = ("name", "step", "size", "age", "metric", "where", "kind", "state", "note")
_STATES: dict[CheckpointState, str] = {"memory_only": "memory only", "newer_release": "of a newer release"}
_PART_STATES: dict[PartState, str] = {
    "waiting": "waits for the durable tier",
    "durable": "durable",
    "sent": "part sent",
    "unknown": "not known here",
    "memory_only": "memory only",
}
#: Where an age in one unit ends, seconds, and how many of them the unit has.
_UNITS = ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h"))


def table_of(
    checkpoints: Sequence[CheckpointInfo], now: datetime, *, with_dirpath: bool = False
) -> tuple[list[str], list[tuple[str, ...]]]:
    """The columns of a table of these, and its rows; on a terminal, without columns that say nothing."""
    names = names_of(checkpoints)
    columns = [*COLUMNS, *(["dirpath"] if with_dirpath else [])]
    rows = [(*_row(each, names, now), *([each.dirpath] if with_dirpath else [])) for each in checkpoints]
    if rows and is_terminal():
        kept = [index for index in range(len(columns)) if any(row[index] not in ("", "full") for row in rows)]
        return [columns[index] for index in kept], [tuple(row[index] for index in kept) for row in rows]
    return columns, rows


def names_of(checkpoints: Iterable[CheckpointInfo]) -> dict[str, str]:
    """What :func:`note_of` takes: the names of saves, by their ids."""
    return {each.save_id: each.name for each in checkpoints if not each.alias_of}


def _row(each: CheckpointInfo, names: dict[str, str], now: datetime) -> tuple[str, ...]:
    is_known = each.kind is not None
    metric = f"{each.metric.monitor}={each.metric.value:.6g}" if each.metric is not None else ""
    kind = each.kind or "?"
    return (
        each.name,
        str(each.step) if each.step is not None else "" if is_known else "?",
        size_text(each.size_bytes) if is_known else "?",
        age_text(each.created, now),
        metric,
        ", ".join(each.where),
        f"{kind}, not resumable" if is_known and not each.resumable else kind,
        state_text(each),
        note_of(each, names),
    )


def state_text(each: CheckpointInfo) -> str:
    """A state, for people."""
    return _STATES.get(each.state, each.state)


def part_text(state: PartState) -> str:
    """What has become of a part in node memory, for people."""
    return _PART_STATES[state]


def note_of(each: CheckpointInfo, names: dict[str, str]) -> str:
    """What else is to be said of a checkpoint; ``names`` are those of the other saves, by their ids."""
    notes = ["latest"] if each.is_latest else []
    if each.alias_of:
        notes.append(f"alias of {each.alias_of}")
    if each.copy_of:
        notes.append(f"copy of {names.get(each.copy_of, 'a deleted checkpoint')}")
    if each.parts > each.parts_here and "durable" not in each.where and each.where:
        notes.append(f"{each.parts_here} of {each.parts} parts on this node")
    return "; ".join([*notes, *([each.problem] if each.problem else [])])


def age_text(created: datetime | None, now: datetime) -> str:
    """How long ago something was made, such as ``90 s``, ``5 min``, ``30 h`` or ``4 d``; "?" where it is not known."""
    if created is None:
        return "?"
    # The writer's clock may be ahead.
    age = max(0.0, (now - created).total_seconds())
    for bound, seconds, unit in _UNITS:
        if age < bound:
            return f"{age // seconds:.0f} {unit}"
    return f"{age // 86400:.0f} d"
