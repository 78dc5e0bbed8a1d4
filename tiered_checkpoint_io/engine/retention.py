"""Retention: which parts a rank may remove from a node's memory. :func:`may_drop` decides, for all payloads.

A node or a process that only loads has no save that would remove anything. So a load applies the rules to loaded parts:
of its own payload and series, and none that another process reads, that only this node has saved, or that waits for its
upload.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tiered_checkpoint_io.memory.node import BusyError, MemoryFullError
from tiered_checkpoint_io.memory.parts import PINNED, StoredPart, is_read
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Kind, Part

#: Number of saves that a node holds, of which the oldest is complete: ranks that train together are one save apart.
_COMPLETE = 2
#: Slots are rounded up to this many bytes.
_ROUND = 2 << 20


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for one save or load of one rank: parts that may go for it, and saves that must stay.

    Attributes:
        series: Key of the names to which the count applies, see :func:`ids.series_of`; empty for all names.
        keep: Number of checkpoints that stay, one at least. Earlier saves fill up for those that are not complete.
        completed: Saves that are complete, the oldest first; None if all are of which this rank has a part.
        lacking: Saves of which the memory of some node has no part, so that it will never hold all of them.
        retained: Saves that stay as well.
        arriving: The part that a load copies to this node, which counts as if it were there.
    """

    save_id: str
    rank: int
    payload: Kind
    place: Place
    series: str = ""
    keep: int = 1
    completed: tuple[str, ...] | None = None
    lacking: Collection[str] = ()
    retained: Collection[str] = ()
    arriving: StoredPart | None = None

    @classmethod
    def of_load(cls, part: Part, keep: int = 1) -> Rules:
        """Returns the rules for a load of ``part``, as those of a save of the payload."""
        series = "" if part.content.kind == "full" else ids.series_of(part.name, part.content.step)
        arriving = StoredPart(part, Path(), drained=True)
        return cls(part.save_id, part.rank, part.content.kind, part.place, series, keep, arriving=arriving)

    def covers(self, stored: StoredPart) -> bool:
        """Returns True if a part counts as one of the same job's checkpoints."""
        return stored.part.place == self.place and self._matches(stored)

    def _matches(self, stored: StoredPart) -> bool:
        return stored.part.content.kind == self.payload and self.series in ("", _series_of(stored))

    def of_this_run(self, save_id: str) -> bool:
        """Returns True if this run made a save."""
        return ids.line_of(save_id) == ids.line_of(self.save_id)

    def may_remove(self, stored: StoredPart) -> bool:
        """Returns True if a covered part is this rank's own, or of an earlier run, whose ranks may be gone.

        Full saves of other ranks have ids of other runs; and other ranks load for themselves.
        """
        is_alone = self.payload == "full" or self.arriving is not None
        return stored.part.rank == self.rank or not (is_alone or self.of_this_run(stored.save_id))

    def may_make_room(self, stored: StoredPart) -> bool:
        """Returns True if the part may be removed when room is needed.

        A part for another durable tier may go. So may, for a save, one of another payload or series that another run
        has left. Process groups that save side by side may look like other runs: a part of another series must be on
        the durable tier first.
        """
        if stored.part.place != self.place:
            return True
        if self._matches(stored):
            return self.may_remove(stored)
        if self.arriving is not None or self.of_this_run(stored.save_id):
            return False
        return stored.part.content.kind != self.payload or _is_uploaded(stored)


def may_drop(
    held: Collection[StoredPart], rules: Rules, *, missing: int = 0, is_spill: bool = False
) -> list[StoredPart]:
    """Returns the parts that a rank removes from memory, in the order in which they go. A pure function.

    A part that waits for the durable tier stays, and so does the newest save that is safe with peers.

    By default, memory is to hold ``keep`` checkpoints of the series. All parts as new as the newest complete save, or
    newer, stay: other ranks may be finishing it. A save that memory will never hold completely goes once there is a
    newer one. A weights-only checkpoint does not replace the newest resumable one.

    If bytes are missing, the oldest saves go first. The newest complete save of the series and the newest resumable one
    stay, or else the newest; with all saves of its step. The same holds for another run's saves of another payload,
    until this run has saved twice, and of another series; before this run has saved, all of them stay. For a save in
    the spill, even the newest may go once it is uploaded.

    ``missing`` are the bytes that are needed: no part goes if that is not enough.
    """
    covered = [each for each in held if rules.covers(each)]
    if not missing:
        mine = [each for each in covered if rules.may_remove(each) and not each.pending]
        free = [each for each in mine if each.save_id not in rules.retained]
        replaced = _replaced(free, covered, rules) - _newest_safe(covered)
        return [each for each in free if each.save_id in replaced]
    free = [each for each in held if rules.may_make_room(each)]
    ours = [each for each in free if rules.covers(each)]
    stays = {*rules.retained, *(rules.completed or ())[-1:], *(each.save_id for each in free if each.pending)}
    stays |= _newest(ours if rules.arriving is None else [*ours, rules.arriving])
    saved = {each.save_id for each in covered if rules.of_this_run(each.save_id)}
    others: defaultdict[tuple[str, str], list[StoredPart]] = defaultdict(list)
    for each in free:
        if each.part.place == rules.place and not rules.covers(each):
            others[each.part.content.kind, _series_of(each)].append(each)
    for (kind, _), of_series in others.items():
        if kind == rules.payload or len(saved) < _COMPLETE:
            stays |= _newest(of_series) if saved else {each.save_id for each in of_series}
    order = sorted((each for each in free if each.save_id not in stays), key=lambda each: each.save_id)
    if is_spill and rules.arriving is None:
        order += [each for each in free if each.save_id in stays and _is_uploaded(each)]
    going: list[StoredPart] = []
    for each in order:
        if missing > 0:
            going.append(each)
            missing -= each.part.content.size
    return going if missing <= 0 else []


def _replaced(free: Iterable[StoredPart], covered: Iterable[StoredPart], rules: Rules) -> set[str]:
    """Returns the saves that newer ones replace: see :func:`may_drop`."""
    ours, newest = {each.save_id for each in free}, max((each.save_id for each in covered), default="")
    useless = {each for each in ours.intersection(rules.lacking) if each < newest}
    completed = rules.completed
    if completed is None:
        completed = tuple(sorted({each.save_id for each in covered if each.part.rank == rules.rank}))
    if not completed:
        return useless
    # The first save of a run may not be complete on other nodes yet.
    replaces_earlier = len(completed) >= _COMPLETE or not rules.of_this_run(completed[-1])
    older = {
        each
        for each in ours.difference(rules.lacking)
        if each < completed[-1] and (replaces_earlier or rules.of_this_run(each))
    }
    resumable = {each.save_id for each in covered if each.part.content.resumable}
    known = resumable.intersection(completed) or resumable & older
    by_worth = dict.fromkeys([*sorted(known)[-1:], *reversed(completed), *sorted(older, reverse=True)])
    return useless | older.difference([*by_worth][: rules.keep])


def complete_here(held: Iterable[StoredPart], rules: Rules, lacking: Collection[str] = ()) -> Rules:
    """Returns the rules of one node, if ranks do not talk: a save is complete if each rank seen here has its part.

    Ranks that train together are never more than one save apart, since each step needs all of them.
    """
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    for each in held:
        if rules.covers(each) and rules.of_this_run(each.save_id):
            ranks[each.save_id].add(each.part.rank)
    seen = set().union(*ranks.values())
    completed = sorted(save_id for save_id, have in ranks.items() if have == seen and save_id not in lacking)
    return replace(rules, completed=tuple(completed), lacking=lacking)


def outdated_replicas(held: Iterable[StoredPart], *, keep: int) -> list[StoredPart]:
    """Returns the replicas that a node removes: each rank's newest ``keep``, and newest safe one, stay.

    Replicas of ranks that send here no longer (the job has other nodes now) go once a newer save is safe.
    """
    forms: defaultdict[tuple[Kind, str], list[StoredPart]] = defaultdict(list)
    for each in held:
        forms[each.part.content.kind, form_of(each.part)].append(each)
    outdated: list[StoredPart] = []
    for (kind, _), of_form in forms.items():
        for rank in {each.part.rank for each in of_form}:
            replicas = [each for each in of_form if each.part.rank == rank]
            newest = max(each.save_id for each in replicas)
            rules = Rules(newest, rank, kind, replicas[0].part.place, keep=keep)
            is_left = newest < max(_newest_safe(of_form), default="")
            outdated += replicas if is_left else may_drop(replicas, rules)
    return sorted(outdated, key=lambda each: (each.save_id, each.part.rank))


def only_here(held: Iterable[StoredPart], there: Mapping[tuple[Place, str], str]) -> list[StoredPart]:
    """Returns the parts without which a restart would lose steps.

    ``there`` has the newest save on the durable tier, by its name.
    """
    groups: defaultdict[tuple[Place, Kind], list[StoredPart]] = defaultdict(list)
    for each in held:
        groups[each.part.place, each.part.content.kind].append(each)
    parts = [each for group in groups.values() for kept in [_newest(group)] for each in group if each.save_id in kept]
    return [each for each in parts if there.get((each.part.place, each.part.name), "") < each.save_id]


def form_of(part: Part) -> str:
    """Returns equal keys for saves of which a later one replaces an earlier one with peers; any number may differ.

    Not for saves of one step, such as averaged weights (``x-EMA.ckpt``) or the shards of process groups: see
    :func:`ids.series_of`.
    """
    return (
        re.sub(r"\d+", "#", part.name) if part.content.kind == "full" else ids.series_of(part.name, part.content.step)
    )


def _series_of(stored: StoredPart) -> str:
    return ids.series_of(stored.part.name, stored.part.content.step)


def _is_uploaded(stored: StoredPart) -> bool:
    return stored.part.durable and not stored.pending


def _newest(held: Collection[StoredPart]) -> set[str]:
    """Returns the newest save to resume from, or else the newest; all of its step; the newest safe one."""
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


def retain(tier: MemoryTier, held: Collection[StoredPart], rules: Rules, *, size: int | None = None) -> None:
    """Removes the parts that memory need not keep any longer.

    If a file of ``size`` bytes needs the room, nothing goes for one that does not fit even then, nor is spilled.
    """
    going = _going(tier, held, rules)
    freed = sum(each.part.content.size for each in going)
    if size is None or freed >= size or tier.spill is not None or (going and freed + tier.room() >= size):
        for each in going:
            tier.remove(each)


def acquire(tier: MemoryTier, size: int, rules: Rules, *, spills: bool = True) -> Slot:
    """Returns a slot of ``size`` bytes; if there is no room, the parts that may go for it are removed.

    With ``spills``, it goes to the spill when memory has no room. Without room in either, this raises MemoryFullError,
    and all parts that memory need not give up are still there.
    """
    try:
        return _acquire_in(tier, tier, size, rules)
    except MemoryFullError as full:
        spill = tier.open_spill() if spills else None
        if spill is None:
            raise
        try:
            return _acquire_in(spill, tier, size, rules)
        except OSError as no_disk:
            both = f"{full.message}; and neither in the spill: {getattr(no_disk, 'message', no_disk)}"
            hint = "give memory_dir more space, lower memory_keep_last, or name a spill_dir with more space"
            raise MemoryFullError(both, operation="stage", tier="memory", key=full.key, hint=hint) from no_disk


def _acquire_in(root: MemoryTier, tier: MemoryTier, size: int, rules: Rules) -> Slot:
    """Returns a slot in one root of a memory tier: the tier itself, or its spill."""
    try:
        return root.acquire(size)
    except BusyError:
        raise
    except MemoryFullError as full:
        advice, needed = root.find_room(size + _ROUND), size + _ROUND
        # The pool has just given up its free slots, so the number of missing bytes is known exactly.
        if root.room() >= needed:
            # These parts were enough, or other processes have given back the missing bytes.
            with contextlib.suppress(MemoryFullError):
                return root.acquire(size)
        held = [each for each in root.parts() if not root.is_spilled(each.folder)]
        going = _going(tier, held, rules, missing=max(1, needed - root.room()), is_spill=root is not tier)
        if not going:
            if advice:
                raise full.reworded(full.message, hint=f"{full.hint}; {advice}") from full
            raise
        for stored in going:
            root.remove(stored)
        return root.acquire(size)


def _going(
    tier: MemoryTier, held: Collection[StoredPart], rules: Rules, *, missing: int = 0, is_spill: bool = False
) -> list[StoredPart]:
    """Does :func:`may_drop`; also parts that are being replicated stay, and for a load, parts that others may use.

    Other machines may already remove earlier saves for a part that is being replicated.
    """
    used = {each.save_id for each in held if rules.arriving is not None and _may_be_used(each)}

    def going(*, is_urgent: bool) -> list[StoredPart]:
        retained = {rules.save_id, *rules.retained, *used, *tier.awaited(tier, is_urgent)}
        return may_drop(held, replace(rules, retained=retained), missing=missing, is_spill=is_spill)

    return going(is_urgent=False) or (going(is_urgent=True) if missing else [])


def _may_be_used(stored: StoredPart) -> bool:
    # A checkpoint of one part that is not pinned yet may be one that another process has fetched and is about to open;
    # of a shard, only the processes of one rank after the other do so.
    was_opened = stored.part.content.parts > 1 or (stored.folder / PINNED).exists()
    return not stored.drained or not was_opened or is_read(stored)
