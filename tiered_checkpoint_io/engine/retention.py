"""Retention: which parts a rank may remove from a node's memory. Pure functions of the parts that memory holds.

One rule for all payloads. Only the evidence differs between ways to save: the saves that are known to be complete.

A node or a process that only loads has no save that would remove anything. So a load applies the rule to loaded parts:
of its own payload and series, and none that another process reads, that only this node has saved, or that waits for its
upload.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import PINNED, StoredPart, is_read
from tiered_checkpoint_io.memory.slots import BusyError, Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import AtPlace, Place, Server
from tiered_checkpoint_io.model.manifest import Kind, Part

#: Number of saves that a node holds, of which the oldest is complete: ranks that train together are one save apart.
_COMPLETE = 2
#: Slots are rounded up to this many bytes.
_ROUND = 2 << 20


@dataclass(frozen=True, slots=True)
class Scope(AtPlace):
    """Scope of retention for one save of one rank.

    Attributes:
        save_id: The save.
        rank: The rank that saves.
        payload: Its payload format.
        dirpath: Its durable tier.
        series: Key of the names to which the count applies, see :func:`ids.series_of`; empty for all names.
        own_rank_only: True if parts of other ranks stay, of any run; by default parts of earlier runs, whose ranks may
            be gone, do not.
        server: Server of the durable tier, see :class:`Place`.
    """

    save_id: str
    rank: int
    payload: str
    dirpath: str
    series: str = ""
    own_rank_only: bool = False
    server: Server | None = None

    def covers(self, stored: StoredPart) -> bool:
        """Returns True if a part counts as one of the same job's checkpoints."""
        return self._matches(stored) and stored.part.place == self.place

    def _matches(self, stored: StoredPart) -> bool:
        return stored.part.content.kind == self.payload and self.series in ("", series_of(stored))

    def of_this_run(self, stored: StoredPart) -> bool:
        """Returns True if this run saved the part."""
        return ids.line_of(stored.save_id) == ids.line_of(self.save_id)

    def may_remove(self, stored: StoredPart) -> bool:
        """Returns True if this rank may remove the part: one of its own, or of an earlier run."""
        return stored.part.rank == self.rank or (not self.own_rank_only and not self.of_this_run(stored))

    def may_make_room(self, stored: StoredPart) -> bool:
        """Returns True if the part may be removed when room is needed.

        A part for another durable tier may go. So may one of another payload or series that another run has left.
        Process groups that save side by side may look like other runs: a part of another series must be on the durable
        tier first.
        """
        if stored.part.place != self.place:
            return True
        if self._matches(stored):
            return self.may_remove(stored)
        is_durable = stored.part.durable and not stored.pending
        return not self.of_this_run(stored) and (stored.part.content.kind != self.payload or is_durable)


def series_of(stored: StoredPart) -> str:
    """See :func:`ids.series_of`."""
    return ids.series_of(stored.part.name, stored.part.content.step)


def form_of(part: Part) -> str:
    """Returns equal keys for saves of which a later one replaces an earlier one with peers; any number may differ.

    Not for saves of one step, such as averaged weights (``x-EMA.ckpt``) or the shards of process groups: see
    :func:`ids.series_of`.
    """
    return (
        re.sub(r"\d+", "#", part.name) if part.content.kind == "full" else ids.series_of(part.name, part.content.step)
    )


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts about the saves whose parts memory holds.

    Attributes:
        completed: Saves that are complete, the oldest first.
        lacking: Saves of which the memory of some node has no part, so that it will never hold all of them.
        covers_earlier_runs: True if it is enough to remove the parts of earlier runs.
    """

    completed: tuple[str, ...]
    lacking: frozenset[str] = frozenset()
    covers_earlier_runs: bool = True


def all_complete(held: Iterable[StoredPart], scope: Scope) -> Evidence:
    """Returns the evidence if each save has one part: all that this rank has in memory is complete."""
    return Evidence(
        tuple(sorted({each.save_id for each in held if scope.covers(each) and each.part.rank == scope.rank}))
    )


def complete_here(held: Iterable[StoredPart], scope: Scope, lacking: Collection[str] = ()) -> Evidence:
    """Returns the evidence of one node, if ranks do not talk: saves of which each rank seen here has its part.

    Ranks that train together are never more than one save apart, since each step needs all of them. Saves of earlier
    runs go only once this run has completed two.

    Args:
        held: All parts in this node's memory.
        scope: Scope of the save that begins.
        lacking: See :class:`Evidence`.
    """
    ranks: dict[str, set[int]] = {}
    for each in held:
        if scope.covers(each) and scope.of_this_run(each):
            ranks.setdefault(each.save_id, set()).add(each.part.rank)
    seen = set().union(*ranks.values())
    completed = sorted(save_id for save_id, have in ranks.items() if have == seen and save_id not in lacking)
    return Evidence(tuple(completed), frozenset(lacking), covers_earlier_runs=len(completed) > 1)


def removable(
    held: Iterable[StoredPart], scope: Scope, keep: int, evidence: Evidence, retained: Collection[str] = ()
) -> list[StoredPart]:
    """Returns the parts that a rank removes so that memory holds ``keep`` checkpoints.

    A part that waits for the durable tier stays, and so do all parts as new as the newest complete save, or
    newer: other ranks may be finishing it. The newest save that is safe with peers stays until a newer one is. A save
    that memory will never hold completely goes once there is a newer one. A weights-only checkpoint does not
    replace the newest resumable one.

    Args:
        held: The parts in memory.
        scope: Scope of the retention.
        keep: Number of checkpoints that stay, one at least. Earlier saves fill up for those that are not complete.
        evidence: Facts about complete saves.
        retained: Ids of saves that stay as well.
    """
    covered = [each for each in held if scope.covers(each)]
    free = [each for each in covered if scope.may_remove(each) and not each.pending and each.save_id not in retained]
    newest = max((each.save_id for each in covered), default="")
    useless = [each for each in free if each.save_id in evidence.lacking and each.save_id < newest]
    if not evidence.completed:
        return useless
    older = [
        each
        for each in free
        if each.save_id < evidence.completed[-1]
        and each.save_id not in evidence.lacking
        and (evidence.covers_earlier_runs or scope.of_this_run(each))
    ]
    kept = set(evidence.completed[-keep:])
    resumable = {each.save_id for each in covered if each.part.content.resumable}
    if not kept & resumable:
        known = resumable.intersection(evidence.completed) or resumable.intersection(each.save_id for each in older)
        if known:
            kept = {max(known), *evidence.completed[max(0, len(evidence.completed) - keep + 1) :]}
    if len(kept) < keep:
        others = sorted({each.save_id for each in older} - kept)
        kept.update(others[len(kept) - keep :])
    kept |= _newest_safe(covered)
    return useless + [each for each in older if each.save_id not in kept]


def room_for(
    missing: int, held: Iterable[StoredPart], scope: Scope, retained: Collection[str] = ()
) -> list[StoredPart]:
    """Returns parts to remove, the oldest saves first, to free ``missing`` bytes; none if that is not enough.

    The newest resumable save of this durable tier always stays, or else the newest; with all saves of its step; and the
    newest that is safe with peers. The same holds for another run's saves of another payload, until this run has saved
    twice, and of another series; before this run has saved, all of them stay.

    Args:
        missing: Bytes.
        held: The parts in memory.
        scope: Scope of the save that needs room.
        retained: Ids of saves that stay as well.
    """
    held = list(held)
    candidates = [each for each in held if scope.may_make_room(each)]
    kept = {*retained, *(each.save_id for each in candidates if each.pending)}
    kept |= _newest([each for each in candidates if scope.covers(each)])
    saved = {each.save_id for each in held if scope.covers(each) and scope.of_this_run(each)}
    left = [each for each in candidates if each.part.place == scope.place and not scope.covers(each)]
    for kind, series in {(each.part.content.kind, series_of(each)) for each in left}:
        of_series = [each for each in left if (each.part.content.kind, series_of(each)) == (kind, series)]
        if not saved:
            kept.update(each.save_id for each in of_series)
        elif kind == scope.payload or len(saved) < _COMPLETE:
            kept |= _newest(of_series)
    removed: list[StoredPart] = []
    for save_id in sorted({each.save_id for each in candidates} - kept):
        if sum(each.part.content.size for each in removed) >= missing:
            break
        removed += [each for each in candidates if each.save_id == save_id]
    return removed if sum(each.part.content.size for each in removed) >= missing else []


def spill_room_for(
    missing: int, held: Iterable[StoredPart], scope: Scope, retained: Collection[str] = ()
) -> list[StoredPart]:
    """Does :func:`room_for` in the spill; there, even the newest may go once its upload is not pending.

    Args:
        missing: Bytes.
        held: The parts in the spill.
        scope: Scope of the save that needs room.
        retained: Ids of saves that stay, except for such parts.
    """
    held = list(held)
    going = room_for(missing, held, scope, retained)
    if not going:
        done = [each for each in held if scope.may_make_room(each) and each.part.durable and not each.pending]
        for each in done:
            if sum(other.part.content.size for other in going) < missing:
                going.append(each)
    return going if sum(each.part.content.size for each in going) >= missing else []


def outdated_replicas(held: Iterable[StoredPart], *, keep: int) -> list[StoredPart]:
    """Returns the replicas that a node removes: each rank's newest ``keep``, and newest safe one, stay.

    Replicas of ranks that send here no longer (the job has other nodes now) go once a newer save is safe.

    Args:
        held: Replicas of one durable tier.
        keep: Number of saves that stay.
    """
    held = list(held)
    outdated: list[StoredPart] = []
    for form, payload, rank in {(form_of(each.part), each.part.content.kind, each.part.rank) for each in held}:
        of_payload = [each for each in held if each.part.content.kind == payload]
        of_form = [each for each in of_payload if form_of(each.part) == form]
        replicas = [each for each in of_form if each.part.rank == rank]
        newest = max(each.save_id for each in replicas)
        if newest < max(_newest_safe(of_form), default=""):
            outdated += replicas
            continue
        place = replicas[0].part.place
        scope = Scope(newest, rank, payload, place.dirpath, server=place.server)
        outdated += removable(replicas, scope, keep, all_complete(replicas, scope))
    return sorted(outdated, key=lambda each: (each.save_id, each.part.rank))


def only_here(held: Iterable[StoredPart], there: Mapping[tuple[Place, str], str]) -> list[StoredPart]:
    """Returns the parts without which a restart would lose steps.

    Args:
        held: All parts in a node's memory.
        there: The newest save on the durable tier, by its name.
    """
    groups: dict[tuple[Place, Kind], list[StoredPart]] = {}
    for each in held:
        groups.setdefault((each.part.place, each.part.content.kind), []).append(each)
    parts = [each for group in groups.values() for kept in [_newest(group)] for each in group if each.save_id in kept]
    return [each for each in parts if there.get((each.part.place, each.part.name), "") < each.save_id]


def _newest(held: Iterable[StoredPart]) -> set[str]:
    """Returns the newest save to resume from, or else the newest; all of its step; the newest safe one."""
    held = list(held)
    resumable = [each for each in held if each.part.content.resumable]
    newest = max(resumable or held, key=lambda each: each.save_id, default=None)
    kept = _newest_safe(held)
    if newest is not None:
        kept |= {newest.save_id, *(each.save_id for each in held if _belong_together(each, newest))}
    return kept


def _belong_together(one: StoredPart, other: StoredPart) -> bool:
    """Returns True if a run saved both at one step, under two names, such as weights and their averages."""
    same_step = one.part.content.step == other.part.content.step >= 0
    return same_step and one.part.name != other.part.name and ids.line_of(one.save_id) == ids.line_of(other.save_id)


def _newest_safe(held: Iterable[StoredPart]) -> set[str]:
    """Returns the newest save that is safe with peers, if any."""
    newest = max((each.save_id for each in held if each.replicated), default=None)
    return set() if newest is None else {newest}


def acquire_for(tier: MemoryTier, size: int, going_for: Callable[[int], list[StoredPart]]) -> Slot:
    """Returns a slot of ``size`` bytes; if there is no room, the parts that ``going_for`` returns are removed.

    Raises:
        MemoryFullError: There is no room even then.
    """
    try:
        return tier.acquire(size)
    except BusyError:
        raise
    except MemoryFullError as full:
        advice = tier.find_room(size + _ROUND)
        # The pool has just given up its free slots, so the number of missing bytes is known exactly.
        missing = size + _ROUND - tier.room()
        if missing <= 0:
            # These parts were enough, or other processes have given back the missing bytes.
            with contextlib.suppress(MemoryFullError):
                return tier.acquire(size)
            missing = size + _ROUND - tier.room()
        going = going_for(max(1, missing))
        if not going:
            if advice:
                raise full.reworded(full.message, hint=f"{full.hint}; {advice}") from full
            raise
        for stored in going:
            tier.remove(stored)
        return tier.acquire(size)


def acquire(
    tier: MemoryTier,
    size: int,
    going_for: Callable[[int, list[StoredPart], bool], list[StoredPart]],
    *,
    spills: bool = True,
) -> Slot:
    """Does :func:`acquire_for` in memory or, if it ``spills``, in the spill.

    Args:
        tier: The memory tier.
        size: Bytes of the slot.
        going_for: Returns the parts that go, by the missing bytes, the parts held there, and True for the spill.
        spills: True if the slot may be one of the spill.

    Raises:
        MemoryFullError: There is no room in either.
    """

    def held(spilled: bool) -> list[StoredPart]:
        # Listed only when room is missing.
        return [each for each in tier.parts() if tier.is_spilled(each.folder) == spilled]

    try:
        return acquire_for(tier, size, lambda missing: going_for(missing, held(False), False))
    except MemoryFullError as full:
        spill = tier.open_spill() if spills else None
        if spill is None:
            raise
        try:
            return acquire_for(spill, size, lambda missing: going_for(missing, held(True), True))
        except OSError as no_disk:
            both = f"{full.message}; and neither in the spill: {getattr(no_disk, 'message', no_disk)}"
            hint = "give memory_dir more space, lower memory_keep_last, or name a spill_dir with more space"
            raise MemoryFullError(both, operation="stage", tier="memory", key=full.key, hint=hint) from no_disk


def slot_for(tier: MemoryTier, part: Part, size: int) -> Slot:
    """Returns a slot of ``size`` bytes for a loaded part; if there is no room, parts of earlier loads go.

    If memory has no room even so, the slot is one of the spill.

    Raises:
        MemoryFullError: There is no room there either.
    """
    scope = _scope_of(part)

    def going_for(missing: int, held: list[StoredPart], _: bool) -> list[StoredPart]:
        # A part of another payload or series of this job may be the newest.
        ours = [each for each in held if scope.covers(each) or each.part.place != scope.place]
        # The new part counts as if it were there: older ones may go for it, even the newest that this node has.
        coming = StoredPart(part, Path(), drained=True)
        going = [*filter(_may_go, ours), coming]
        return room_for(missing, going, scope, {part.save_id, *tier.awaited(True)})

    return acquire(tier, size, going_for)


def retain_loaded(tier: MemoryTier, part: Part, keep: int) -> None:
    """Removes loaded parts beyond ``keep``, now that all ranks of this node have opened ``part``."""
    held, scope = tier.parts(), _scope_of(part)
    retained = {part.save_id, *tier.awaited(False)}
    for stored in removable(held, scope, max(1, keep), all_complete(held, scope), retained):
        if _may_go(stored):
            tier.remove(stored)


def _may_go(stored: StoredPart) -> bool:
    # A checkpoint of one part that is not pinned yet may be one that another process has fetched and is about to open;
    # of a shard, only the processes of one rank after the other do so.
    was_opened = stored.part.content.parts > 1 or (stored.folder / PINNED).exists()
    return stored.drained and was_opened and not is_read(stored)


def _scope_of(part: Part) -> Scope:
    kind, place = part.content.kind, part.place
    # The same as in saves of the payload: the names of full checkpoints are one series.
    series = "" if kind == "full" else ids.series_of(part.name, part.content.step)
    return Scope(part.save_id, part.rank, kind, place.dirpath, series, own_rank_only=True, server=place.server)
