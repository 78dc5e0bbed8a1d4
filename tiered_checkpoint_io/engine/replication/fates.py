"""Fates of replicated saves, decided once for all ranks. A rank removes no part of an undecided save.

A save is *replicated* once all of its parts are on all their peers: only then is it safe from the loss of a node, and
only then may the replicated one before it go. Each rank counts its part in the store when its peers have it. The first
rank that finds the count complete writes to the store that the save is replicated; a rank that can't replicate its
part, or does not wait any longer, writes that the save is given up. Both write by one compare-and-set, so that one of
them counts, for all ranks. A rank that has marked a save lets the earlier one go; the others keep their parts of the
newer one until they mark it, too.

The store is memory of one host, and a job may save for weeks: so the keys of decided saves are removed again. The
newest replicated save's keys stay: all ranks have begun to send it, so none waits for an earlier one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping

from tiered_checkpoint_io.engine.ranks.store_client import StoreClient
from tiered_checkpoint_io.engine.staging.retention import form_of
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Part

_REPLICATED = "replicated"
_GIVEN_UP = "given up"

#: Number of given-up saves of which other ranks do not know yet; they have given up older ones as well.
_MAX_DROPPED = 16
#: Number of decided saves whose keys stay in the store: a late rank asks for them, or would wait for ever.
_MAX_DECIDED = 16

#: Key of saves of which the later replace the earlier with peers: a durable tier, and a form of names.
FormKey = tuple[Place, str]


def form_key(part: Part) -> FormKey:
    """Returns the key of a part's form: the saves that the part's own save is one of."""
    return part.place, form_of(part)


def newest_replicated(held: Iterable[StoredPart]) -> dict[FormKey, str]:
    """Returns the newest save of each form that is marked as replicated."""
    return newest_of((form_key(each.part), each.save_id) for each in held if each.replicated)


def newest_of(saves: Iterable[tuple[FormKey, str]]) -> dict[FormKey, str]:
    """Returns the newest save of each form."""
    return dict(sorted(saves, key=lambda each: each[1]))


class Fates:
    """One rank's knowledge of the saves whose parts it sends or keeps; for the two threads that replicate."""

    def __init__(self, store: StoreClient, tier: MemoryTier, replicated: Mapping[FormKey, str]) -> None:
        """Takes the ``replicated`` saves that all ranks together know, and marks them on this node."""
        self._store = store
        self._tier = tier
        self._lock = threading.Lock()
        self._replicated = dict(replicated)
        #: The part of each rank that is being replicated; at most one of each.
        self._open: dict[int, Part] = {}
        #: Saves of which this rank has counted no part, and will not.
        self._dropped: deque[Part] = deque(maxlen=_MAX_DROPPED)
        #: Saves that are decided, and whose keys are still in the store; the latest last.
        self._decided: list[str] = []
        self._mark(set(replicated.values()))

    def awaited(self) -> set[str]:
        """Returns the saves that must stay: the newest replicated ones, and saves that may become replicated."""
        with self._lock:
            return {*self._replicated.values(), *(part.save_id for part in self._open.values())}

    def begin(self, part: Part) -> bool:
        """Begins to replicate a rank's part; that rank's earlier part is not waited for any longer.

        Returns:
            True if that is of any use: not if the save is given up, or the rank's newer one is being replicated.
        """
        earlier = self._open.get(part.rank)
        if earlier is not None and earlier.save_id != part.save_id:
            if form_key(part) == form_key(earlier) and part.save_id < earlier.save_id:
                # A part of an earlier start, which another rank sends again, does not count.
                return False
            self._decide(earlier, gives_up=True)
        with self._lock:
            self._open[part.rank] = part
        return self._decide(part) != _GIVEN_UP

    def arrived(self, part: Part) -> None:
        """Takes a replica that is kept; marks its save again if it was replicated before this node lost it."""
        if part.save_id in self._replicated.values():
            self._mark({part.save_id})

    def count(self, part: Part) -> None:
        """Counts a part of this rank that all peers have, and which stays until its save is decided."""
        self._store.add(f"copied/{part.save_id}")

    def drop(self, part: Part) -> None:
        """Gives up this rank's part; asks nothing, :meth:`look` informs the other ranks."""
        with self._lock:
            self._close(part.save_id)
            self._dropped.append(part)

    def is_decided(self, part: Part) -> bool:
        """Returns True if the decision about a save's replicas is known; marks a replicated save."""
        return bool(self._decide(part))

    def is_open(self, part: Part) -> bool:
        """Returns True if this rank does not know yet whether a save is replicated; asks nothing."""
        with self._lock:
            return any(each.save_id == part.save_id for each in self._open.values())

    def look(self) -> None:
        """Learns the decisions, and informs the other ranks of the saves that this rank has given up."""
        with self._lock:
            opened = {part.save_id: part for part in self._open.values()}
            dropped = list(self._dropped)
        for part in opened.values():
            self._decide(part)
        for part in dropped:
            self._decide(part, gives_up=True)
            with self._lock:
                self._dropped = deque((each for each in self._dropped if each is not part), _MAX_DROPPED)

    def _decide(self, part: Part, *, gives_up: bool = False) -> str | None:
        key = f"fate/{part.save_id}"
        fate = self._store.get(key)
        if fate is None:
            is_complete = self._store.add(f"copied/{part.save_id}", 0) >= part.content.parts
            if is_complete or gives_up:
                fate = self._store.swap(key, "", _REPLICATED if is_complete else _GIVEN_UP)
        if fate == _REPLICATED:
            self._mark({part.save_id})
        if fate is not None:
            with self._lock:
                if fate == _REPLICATED:
                    self._replicated = newest_of([*self._replicated.items(), (form_key(part), part.save_id)])
                self._close(part.save_id)
                outlived = self._outlived(part.save_id)
            if outlived:
                self._store.forget(*(f"{what}/{each}" for each in outlived for what in ("copied", "fate")))
        return fate

    def _outlived(self, save_id: str) -> list[str]:
        """Returns the saves of which no rank asks any more, now that another one is decided."""
        decided, newest = [*(each for each in self._decided if each != save_id), save_id], self._replicated.values()
        outlived = [each for each in decided[:-_MAX_DECIDED] if each not in newest]
        self._decided = [each for each in decided if each not in outlived]
        return outlived

    def _close(self, save_id: str) -> None:
        self._open = {rank: part for rank, part in self._open.items() if part.save_id != save_id}

    def _mark(self, saves: set[str]) -> None:
        for tier in (self._tier, self._tier.replicas):
            for stored in tier.parts():
                if stored.save_id in saves and not stored.replicated:
                    tier.mark_replicated(stored)
