"""Which checkpoints memory keeps: a pure function of what is there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What retention needs to know of one part in memory."""

    save_id: str
    size: int
    pending: bool


def surplus(held: Sequence[Held], *, keep_last: int, protect: Collection[str] = ()) -> list[str]:
    """Save ids to remove so that the newest ``keep_last`` stay.

    A part that waits for the durable tier stays, and so does a protected one; neither counts
    against those that are kept.
    """
    ordered = sorted(held, key=lambda part: part.save_id, reverse=True)
    return [part.save_id for part in ordered[keep_last:] if not part.pending and part.save_id not in protect]


def make_room(held: Sequence[Held], *, missing: int, protect: Collection[str] = ()) -> list[str]:
    """Save ids to remove, the oldest first, so that ``missing`` bytes come free.

    The newest stays whatever happens: what was good stays until what replaces it is good. Where
    that cannot free enough, nothing is removed.
    """
    ordered = sorted(held, key=lambda part: part.save_id)
    removed: list[str] = []
    freed = 0
    for part in ordered[:-1]:
        if freed >= missing:
            break
        if not part.pending and part.save_id not in protect:
            removed.append(part.save_id)
            freed += part.size
    return removed if freed >= missing else []
