"""Which checkpoints memory keeps: a pure function of what is there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.model import ids


@dataclass(frozen=True, slots=True)
class Held:
    """What retention needs to know of one part in memory."""

    save_id: str
    size: int
    pending: bool
    replicated: bool = False


def surplus(held: Sequence[Held], *, keep_last: int, protect: Collection[str] = ()) -> list[str]:
    """Save ids to remove so that the newest ``keep_last`` stay.

    A part that waits for the durable tier stays, so does a protected one, and so does the newest that is
    safe with peers, until a newer one is; none of them counts against those that are kept.
    """
    ordered = sorted(held, key=lambda part: part.save_id, reverse=True)
    kept = {*protect, *safest((part.save_id, part.replicated) for part in ordered)}
    return [part.save_id for part in ordered[keep_last:] if not part.pending and part.save_id not in kept]


def safest(held: Iterable[tuple[str, bool]]) -> set[str]:
    """Of save ids, each with whether it is safe with peers, the newest that is; none where none is."""
    newest = max((save_id for save_id, replicated in held if replicated), default=None)
    return set() if newest is None else {newest}


@dataclass(frozen=True, slots=True)
class Copy:
    """What retention needs to know of a copy that this node keeps for another one.

    Attributes:
        save_id: Its save.
        rank: Whose part it is.
        name: The checkpoint's name.
        replicated: Whether all parts of the save are on their peers.
    """

    save_id: str
    rank: int
    name: str
    replicated: bool


def outdated_copies(copies: Sequence[Copy], *, keep_last: int) -> list[Copy]:
    """The copies to remove: of each rank's, the newest ``keep_last`` stay, and the newest of a save that is safe.

    Copies for ranks that send here no longer (the job has other nodes now) go once a newer save is safe.

    Args:
        copies: Those of one kind and one durable tier.
        keep_last: How many saves are kept.
    """
    removed = []
    for series in {ids.series_of(copy.name) for copy in copies}:
        mine = [copy for copy in copies if ids.series_of(copy.name) == series]
        safe = safest((copy.save_id, copy.replicated) for copy in mine)
        for rank in {copy.rank for copy in mine}:
            ordered = sorted((copy for copy in mine if copy.rank == rank), key=lambda copy: copy.save_id, reverse=True)
            if safe and ordered[0].save_id < min(safe):
                removed += ordered
                continue
            kept = safest((copy.save_id, copy.replicated) for copy in ordered)
            removed += [copy for copy in ordered[keep_last:] if copy.save_id not in kept]
    return sorted(removed, key=lambda copy: (copy.save_id, copy.rank))


def make_room(held: Sequence[Held], *, missing: int, protect: Collection[str] = ()) -> list[str]:
    """Save ids to remove, the oldest first, so that ``missing`` bytes come free.

    The newest stays whatever happens, and the newest that is safe with peers: what was good stays until
    what replaces it is good. Where that cannot free enough, nothing is removed.
    """
    ordered = sorted(held, key=lambda part: part.save_id)
    kept = {*protect, *safest((part.save_id, part.replicated) for part in ordered)}
    removed: list[str] = []
    freed = 0
    for part in ordered[:-1]:
        if freed >= missing:
            break
        if not part.pending and part.save_id not in kept:
            removed.append(part.save_id)
            freed += part.size
    return removed if freed >= missing else []
