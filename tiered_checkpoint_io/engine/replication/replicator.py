"""Copies of parts in the memory of other nodes: a rank offers its part, and its peers read it from its node's drain.

An *offer* is a key of the store of torch.distributed: the save, and the endpoint of its node's memory. A rank that
keeps copies looks at that key a few times a second, and every two seconds if nothing has come for long. That rank reads
the part as a restore does, commits it as a replica, and answers by another key; during the read, the answer is the
progress. A part is replicated once all peers have answered that they keep it. No rank sends bytes.

*Fates* of saves are decided once for all ranks. A rank removes no part of an undecided save. A save is *replicated*
once all of its parts are on all their peers: only then is it safe from the loss of a node, and only then may the
replicated one before it go. Each rank counts its part in the store when its peers have it. The first rank that finds
the count complete writes to the store that the save is replicated; a rank that can't replicate its part, or does not
wait any longer, writes that the save is given up. Both write by one compare-and-set, so that one of them counts, for
all ranks. A rank that has marked a save lets the earlier one go; the others keep their parts of the newer one until
they mark it, too.

The store is memory of one host, and a job may save for weeks: so the keys of decided saves are removed again. The
newest replicated save's keys stay: all ranks have begun to send it, so none waits for an earlier one.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.chunks import SlotDestination, describe, read_part
from tiered_checkpoint_io.engine.ranks.run import LostStoreError, PeerError, StoreClient
from tiered_checkpoint_io.engine.retention import form_of, outdated_replicas
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, of_step, rate
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores.peer import Endpoint, PeerStore

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


#: Number of parts that wait to be offered; if there are more, the oldest are outdated.
_MAX_WAITING = 2
_KEPT, _READING = "kept", "reading"


@dataclass(frozen=True, slots=True)
class Member:
    """This rank, in a group whose ranks keep copies of each other's parts.

    Attributes:
        tier: This node's memory.
        store: The keys that all ranks of the group share.
        rank: This rank.
        config: Configuration with the bounds.
        log: Logger to use.
        clock: The session's.
        serve: Has this node's drain serve its memory.
    """

    tier: MemoryTier
    store: StoreClient
    rank: int
    config: TieredCheckpointConfig
    log: Logger
    clock: Clock
    serve: Callable[[], Endpoint | None]

    @property
    def timeout_s(self) -> float:
        """Bound of one part's transfer, seconds."""
        return float(self.config.support.wait_timeout_s)


class Replicator:
    """The replication of one rank of a group, on two threads, without collectives.

    A failure costs a warning and a count: the part stays in this node's memory, and training continues.
    """

    def __init__(
        self,
        member: Member,
        peers: Sequence[tuple[int, ...]],
        counts: Counter[str],
        replicated: Mapping[FormKey, str],
    ) -> None:
        """Starts the threads.

        Args:
            member: This rank.
            peers: The ranks that keep replicas of each rank's parts, by rank.
            counts: ``replicated`` and ``unreplicated`` parts.
            replicated: Saves that some rank knows to be replicated.
        """
        self._store, fates = member.store, Fates(member.store, member.tier, replicated)
        self._keeper = Keeper(member, [rank for rank, theirs in enumerate(peers) if member.rank in theirs], fates)
        self._offers = Offers(member, peers[member.rank], counts, fates)

    def offer(self, stored: StoredPart, *, again: bool = False) -> None:
        """Offers a part that has just been committed, see :meth:`Offers.add`."""
        self._offers.add(stored, again=again)
        # This rank has saved; the ranks whose replicas it keeps have saved as well, or will soon.
        self._keeper.wake()

    def awaited(self, urgent: bool) -> set[str]:
        """See :meth:`Offers.awaited`."""
        return self._offers.awaited(urgent)

    @property
    def pending(self) -> int:
        """See :attr:`Offers.pending`."""
        return self._offers.pending

    def close(self, timeout_s: float) -> None:
        """Offers queued parts, within the bound, reads parts offered to this rank, and ends both threads."""
        self._offers.close(timeout_s)
        self._keeper.close()
        self._store.close()


# ---------------------------------------------------------------------------------------- offering
class Offers:
    """This rank's parts, offered one after the other, each to all its peers at once."""

    def __init__(self, member: Member, targets: Sequence[int], counts: Counter[str], fates: Fates) -> None:
        """Starts the thread; see :class:`Replicator`, ``fates`` learns of each part that is on all targets."""
        self._member, self._targets, self._fates = member, targets, fates
        self._store, self._clock, self._log = member.store, member.clock, member.log
        self.counts = counts
        self._number = 0
        #: Peers that did not answer: the next wait for them is short.
        self._lost: set[int] = set()
        self._changed = threading.Condition()
        self._waiting: deque[StoredPart] = deque()
        self._offered: StoredPart | None = None
        #: Saves of an earlier start, which some peers lack; whether they are replicated is known.
        self._again: set[str] = set()
        self._is_closing = self._is_over = False
        self._thread = self._clock.start(self._run, "tiered-replicate")

    def add(self, stored: StoredPart, *, again: bool = False) -> None:
        """Takes a part that has just been committed; returns at once.

        ``again``: the part is of an earlier start, and does not count towards its save's replication.
        """
        with self._changed:
            self._again.update([stored.save_id] if again else [])
            if self._is_closing:
                outdated, why = [stored], "replication has ended"
            else:
                self._waiting.append(stored)
                # All lost parts of an earlier start wait here; none of them is outdated.
                fresh = [each for each in self._waiting if each.save_id not in self._again]
                outdated = fresh[:-_MAX_WAITING]
                for each in outdated:
                    self._waiting.remove(each)
                why = "replaced by newer saves: peers or network are too slow for this save interval"
                self._changed.notify_all()
        for each in outdated:
            self._failed(each, why)

    @property
    def pending(self) -> int:
        """Parts that are not on their peers yet, and not given up."""
        with self._changed:
            return len(self._waiting) + (self._offered is not None)

    def awaited(self, urgent: bool) -> set[str]:
        """Returns the saves of which no part may be removed, because they are replicated, or may become so.

        ``urgent``: room is needed, so of parts that are not offered yet, only the newest still waits.
        """
        with self._changed:
            spared = [self._waiting.popleft() for _ in range(len(self._waiting) - 1)] if urgent else []
            own = {each.save_id for each in (*self._waiting, self._offered) if each is not None}
        for each in spared:
            self._failed(each, "memory had no room to keep it until then")
        # Listed last: the parts that are offered next are already among these.
        return own | self._fates.awaited()

    def close(self, timeout_s: float) -> None:
        """Offers waiting parts, for so many seconds at most, and ends the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._clock.wait_for(
                self._changed, lambda: self._is_over or not (self._waiting or self._offered), timeout_s
            )
            left = list(self._waiting)
            self._waiting.clear()
        for each in left:
            self._failed(each, "the process has ended")
        self._clock.join(self._thread, self._clock.timing.replication_linger_s + self._clock.timing.message_s)

    def _run(self) -> None:
        is_store_lost = False
        while True:
            with self._changed:
                self._offered = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                # At the end of a job, the store ends with the rank that hosts it, and no part can be offered any more.
                self._is_over = is_store_lost or not self._waiting
                if self._is_over:
                    self._changed.notify_all()
                    break
                stored = self._offered = self._waiting.popleft()
            is_store_lost = self._replicate(stored) and self._is_closing
        if not is_store_lost:
            with contextlib.suppress(PeerError):
                self._store.set(f"ended/{self._member.rank}")

    def _replicate(self, stored: StoredPart) -> bool:
        """Has all peers keep a part; returns True if the store was lost."""
        part, started, counts = stored.part, self._clock.monotonic(), stored.save_id not in self._again
        problems, is_store_lost = list[str](), False
        try:
            if counts and not self._fates.begin(part):
                problems.append("another rank has given up this save")
            else:
                problems = self._offer(part)
            if not problems and counts:
                # Without an answer, the part may have been counted, and stays until that is known.
                self._fates.count(part)
        except LostStoreError as error:
            problems, is_store_lost = [str(error)], True
        if (problems and not is_store_lost) or not counts:
            self._fates.drop(part)
        if problems:
            self._warn(stored, "; ".join(problems))
            return is_store_lost
        self.counts["replicated"] += 1
        amount = rate(part.content.size, self._clock.monotonic() - started)
        self._log.info(
            "%sreplicated %s to %d peer(s): %s", of_step(part.content.step), part.name, len(self._targets), amount
        )
        return counts and self._await_others(part)

    def _offer(self, part: Part) -> list[str]:
        """Offers a part to all peers, and waits for their answers; returns the failure."""
        member, clock, timing = self._member, self._clock, self._clock.timing
        endpoint = member.serve()
        if endpoint is None:
            return ["this node's memory is not served to others"]
        self._number += 1
        key = f"offer/{member.rank}"
        self._store.set(key, json.dumps([self._number, part.save_id, part.rank, *endpoint]))
        began = clock.monotonic()
        problems, said, moved_at = list[str](), dict[int, object](), dict.fromkeys(self._targets, began)
        waited_for = set(self._targets)
        while waited_for:
            now = clock.monotonic()
            for target in sorted(waited_for):
                state, text = self._answer(target)
                if state == _READING and said.get(target) != text:
                    said[target], moved_at[target] = text, now
                accept_s = timing.accept_again_s if target in self._lost else timing.accept_s
                patience_s = timing.message_s if state == _READING else min(self._member.timeout_s, accept_s)
                problem = "" if state in ("", _READING) else text
                if state == _KEPT:
                    problem = ""
                elif now - moved_at[target] > patience_s or now - began > member.timeout_s:
                    problem = f"the peer did not answer within {now - began:.0f} s"
                elif not state and self._store.get(f"left/{target}") is not None:
                    problem = "the peer has ended"
                if problem or state == _KEPT:
                    waited_for.remove(target)
                    (self._lost.discard if state == _KEPT else self._lost.add)(target)
                problems += [f"rank {target}: {problem}"] if problem else []
            if waited_for:
                clock.sleep(timing.pause_s(timing.accept_poll_s, clock.monotonic() - began))
        self._store.forget(key)
        return problems

    def _answer(self, target: int) -> tuple[str, str]:
        said = self._store.get(f"answer/{self._member.rank}/{target}")
        number, state, text = json.loads(said) if said is not None else (0, "", "")
        return (state, text) if number == self._number else ("", "")

    def _await_others(self, part: Part) -> bool:
        """Waits until a save is decided, so that ranks offer parts of the same one; returns True if the store was lost.

        Without the wait, ranks of different speed would each offer other saves, and none would ever be replicated.
        """
        deadline = self._clock.monotonic() + self._clock.timing.others_send_s
        try:
            self._fates.is_decided(part)
        except LostStoreError:
            return True
        # From here on, the keeper asks the store for both.
        while self._fates.is_open(part) and not self._is_closing and self._clock.monotonic() < deadline:
            self._clock.sleep(self._clock.timing.offer_poll_s)
        return False

    def _failed(self, stored: StoredPart, why: str) -> None:
        self._fates.drop(stored.part)
        self._warn(stored, why)

    def _warn(self, stored: StoredPart, why: str) -> None:
        self.counts["unreplicated"] += 1
        part = stored.part
        self._log.warning(
            "%srank %d's part of %s was not replicated, only this node has it: %s",
            of_step(part.content.step),
            part.rank,
            part.name,
            why,
        )


# ----------------------------------------------------------------------------------------- keeping
class Keeper:
    """Reads parts that peers offer to this rank into this node's replicas, each verified before its commit."""

    def __init__(self, member: Member, sources: Sequence[int], fates: Fates) -> None:
        """Starts the thread; ``sources`` are the ranks of whose parts it keeps replicas."""
        self._member, self._sources, self._fates = member, sources, fates
        self._tier, self._store = member.tier, member.store
        self._log, self._clock = member.log, member.clock
        #: The last offer of each source that was taken.
        self._taken: dict[int, str] = {}
        self._missed = 0
        held = [*self._tier.parts(), *self._tier.replicas.parts()]
        #: The newest save of each form that this node had when the ranks met.
        self._newest_before = newest_of((form_key(stored.part), stored.save_id) for stored in held)
        self._is_closing = False
        #: Ends a pause.
        self._bell = threading.Event()
        #: Time when there was something to read, or about to be.
        self._news_at = self._clock.monotonic()
        self._thread = self._clock.start(self._run, "tiered-keep-replicas")

    def wake(self) -> None:
        """Looks often again."""
        self._news_at = self._clock.monotonic()
        self._bell.set()

    def close(self) -> None:
        """Takes parts that are still offered to this rank, and ends the thread."""
        self._is_closing = True
        self.wake()
        self._clock.join(self._thread, self._clock.timing.replication_linger_s + self._clock.timing.message_s)

    def _run(self) -> None:
        timing, ended_at = self._clock.timing, None
        while True:
            is_closing, idle, over, unreachable = self._is_closing, True, False, ""
            try:
                for source in self._sources:
                    offer = self._store.get(f"offer/{source}")
                    if offer is not None and offer != self._taken.get(source):
                        idle, self._news_at = False, self._clock.monotonic()
                        self._take(source, offer)
                        self._taken[source] = offer
                self._fates.look()
                over = is_closing and all(self._store.get(f"ended/{source}") for source in self._sources)
            except Exception as error:
                unreachable = str(error)
            self._report(unreachable)
            if is_closing:
                now = self._clock.monotonic()
                ended_at = ended_at or now
                if idle and (over or unreachable or now > ended_at + timing.replication_linger_s):
                    break
            if idle:
                pause = timing.pause_s(timing.offer_poll_s, self._clock.monotonic() - self._news_at)
                self._clock.wait(self._bell, timing.offer_retry_s if unreachable else pause)
                self._bell.clear()
        if not unreachable:
            with contextlib.suppress(PeerError):
                self._store.set(f"left/{self._member.rank}")

    def _report(self, unreachable: str) -> None:
        """Warns once when the store does not answer, and logs once when it does again."""
        if not unreachable:
            if self._missed > 1:
                self._log.info("receiving replicas again")
            self._missed = 0
            return
        self._missed += 1
        # At the end of a job, the store ends with the rank that hosts it.
        if self._missed == 2 and not self._is_closing:
            self._log.warning("receiving no replicas for now: %s", unreachable)

    def _take(self, source: int, offer: str) -> None:
        """Reads one part, if it is wanted, and answers. Its source warns of a failure; here it is logged."""
        number, save_id, rank, *where = json.loads(offer)
        said_at = self._clock.monotonic()

        def answer(state: str, text: object = "") -> None:
            self._store.set(f"answer/{source}/{self._member.rank}", json.dumps([number, state, text]))

        def progress(count: int) -> None:
            nonlocal said_at
            now = self._clock.monotonic()
            if now - said_at > self._clock.timing.offer_retry_s:
                said_at = now
                answer(_READING, count)

        answer(_READING, 0)
        try:
            with contextlib.closing(PeerStore(Endpoint(*where), clock=self._clock)) as store:
                self._keep(store, save_id, rank, progress)
        except LostStoreError:
            raise
        except Exception as error:
            self._log.debug("rank %d's part did not arrive: %s", source, error)
            answer("failed", str(error) if isinstance(error, TieredCheckpointError) else repr(error))
        else:
            answer(_KEPT)

    def _keep(self, store: PeerStore, save_id: str, rank: int, progress: Callable[[int], None]) -> None:
        kept, part = self._tier.replicas, describe(store, save_id, rank)
        # From here on the replica stays, so that its source may count it.
        self._fates.begin(part)
        if kept.is_taken(part.save_id, part.rank) or self._tier.is_taken(part.save_id, part.rank):
            return
        read_part(part, [store], SlotDestination(kept, part, acquire=lambda size: self._slot(size, part)), progress)
        self._fates.arrived(part)
        if not self._is_left_over(part):
            self._prune(part, keep=self._member.config.memory_keep_last)

    def _slot(self, size: int, part: Part) -> Slot:
        kept = self._tier.replicas
        try:
            return kept.acquire(size)
        except MemoryFullError:
            if self._is_left_over(part):
                raise
            # Keep one replica fewer, unless that is the only one of a complete save.
            self._prune(part, keep=max(1, self._member.config.memory_keep_last - 1))
            return kept.acquire(size)

    def _is_left_over(self, part: Part) -> bool:
        """Returns True if an earlier run saved the part: until this run saves, ranks may be loading an older save."""
        return part.save_id <= self._newest_before.get(form_key(part), "")

    def _prune(self, part: Part, *, keep: int) -> None:
        """Removes outdated replicas that this rank keeps, and outdated ones of earlier runs."""
        kept, form, run = self._tier.replicas, form_of(part), ids.line_of(part.save_id)
        held = [stored for stored in kept.parts() if stored.part.place == part.place]
        for stored in outdated_replicas(held, keep=keep):
            own = stored.part.rank in self._sources and form_of(stored.part) == form
            if own or ids.line_of(stored.save_id) != run:
                kept.remove(stored)
