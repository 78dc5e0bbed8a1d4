"""Copies of this rank's parts in the memory of peers on other nodes, made behind training's back.

Two threads: one sends parts, one after the other, each to all its peers; the other takes what is offered to
this rank. Neither takes part in a collective. A copy is committed by whoever receives it once all its hashes
match. Whatever fails costs a warning and a count, ``unreplicated``: the part stays where it is, and training
goes on.

A part is marked as replicated once *all* parts of its save are on all their peers: only then is the save
safe from the loss of a node, and only then may the safe one before it go. Each rank counts its part on the
board when it is done, and looks there for the saves that it has parts or copies of.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.engine import retention
from tiered_checkpoint_io.engine.carrying import commit_received
from tiered_checkpoint_io.engine.peer_link import Board, Link, Offer
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    MemoryFullError,
    MemoryTierError,
    PeerError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, rate
from tiered_checkpoint_io.manifest import FileEntry, Part
from tiered_checkpoint_io.storage.memory import MemoryTier, StoredPart
from tiered_checkpoint_io.storage.slots import Slot

#: How often a rank looks for offers, and for saves that have become whole.
_LOOK_S = 0.25
#: How often the source of an offer looks whether it is accepted: that ends a wait of its own.
_ACCEPT_LOOK_S = 0.02
#: A live peer that is not busy accepts within a second, one that is busy after another rank's part.
_ACCEPT_S = 120.0
#: After a peer has failed once; it may have woken up again.
_ACCEPT_AGAIN_S = 5.0
#: A message is a chunk of 16 MiB or less, mostly.
_MESSAGE_S = 30.0
#: Parts that wait to be sent; of more, the oldest are outdated.
_MAX_WAITING = 2
#: How long a rank that is done still takes what its sources send.
_LINGER_S = 10.0
#: Saves of which it is not known yet whether all their parts are copied.
_MAX_UNSETTLED = 16


_HAVE = "have it already"


class _RefusedError(PeerError):
    """The peer lives, but could not keep this part."""


@dataclass(frozen=True, slots=True)
class Clique:
    """Who copies to whom; see ``placement``.

    Attributes:
        rank: This rank, in the group.
        targets: The ranks that keep copies of its parts.
        sources: The ranks of whose parts it keeps copies.
    """

    rank: int
    targets: tuple[int, ...]
    sources: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, peers: Sequence[tuple[int, ...]]) -> Clique:
        """A rank's, given the peers of all ranks."""
        return cls(rank, peers[rank], tuple(other for other, theirs in enumerate(peers) if rank in theirs))


class Replicator:
    """Sends this rank's parts to its peers, and keeps theirs."""

    def __init__(
        self,
        tier: MemoryTier,
        clique: Clique,
        boards: tuple[Board, Board],
        logger: Logger,
        counts: Counter[str],
        *,
        keep_last: int,
        timeout_s: float,
    ) -> None:
        """Starts both threads.

        Args:
            tier: This node's memory.
            clique: Who copies to whom.
            boards: One for each thread.
            logger: Where to log.
            counts: ``replicated`` and ``unreplicated`` parts of this rank.
            keep_last: Of how many saves a peer's copies are kept.
            timeout_s: Bound of one part's way to one peer, seconds.
        """
        self._tier = tier
        self._clique = clique
        self._outgoing, self._incoming = boards
        self._log = logger
        self._counts = counts
        self._keep_last = keep_last
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[StoredPart] = deque()
        self._sending = False
        self._closing = False
        self._lost: set[int] = set()
        self._unsettled: dict[str, None] = {}
        #: Of each target, how many links there were, and the one that is open; of each source, likewise.
        self._made: Counter[int] = Counter()
        self._to: dict[int, Link] = {}
        self._from: dict[int, Link] = {}
        self._threads = [
            threading.Thread(target=self._guard(work), name=name, daemon=True)
            for name, work in (("tiered-replicate", self._send_all), ("tiered-keep-copies", self._take_all))
        ]
        for thread in self._threads:
            thread.start()

    # ----------------------------------------------------------------------------------- interface
    def offer(self, stored: StoredPart) -> None:
        """Takes a part that has just been committed; returns at once."""
        with self._changed:
            self._waiting.append(stored)
            outdated = [self._waiting.popleft() for _ in range(len(self._waiting) - _MAX_WAITING)]
            self._changed.notify_all()
        for each in outdated:
            self._failed(each, "newer ones came before its turn: peers, or the network, are too slow for so many saves")

    @property
    def pending(self) -> int:
        """Parts that are not on their peers yet, and not given up."""
        with self._changed:
            return len(self._waiting) + self._sending

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is on its way to peers; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._sending, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Sends what waits, takes what is being sent to this rank, and ends both threads.

        Args:
            timeout_s: Bound of the wait for what is to be sent, seconds.
        """
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            for each in self._waiting:
                self._failed(each, "the process has ended")
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_LINGER_S + _MESSAGE_S)
        for links in (self._to, self._from):
            for rank in list(links):
                self._close(links, rank)

    # --------------------------------------------------------------------------------------- sending
    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                stored = self._waiting.popleft()
                self._sending = True
            self._send(stored)
        with contextlib.suppress(PeerError):
            self._outgoing.ends()

    def _send(self, stored: StoredPart) -> None:
        content, started = stored.part.content, time.monotonic()
        problems = []
        for target in self._clique.targets:
            try:
                with self._tier.reading(stored) as views:
                    self._send_to(target, stored.part, views)
                self._lost.discard(target)
            except Exception as error:
                problems.append(f"rank {target}: {error}")
                if isinstance(error, PeerError) and not isinstance(error, _RefusedError):
                    self._lost.add(target)
        if not problems:
            try:
                self._outgoing.copied(content.save_id, 1 if content.kind == "full" else content.world_size)
            except PeerError as error:
                problems.append(str(error))
        if problems:
            self._failed(stored, "; ".join(problems))
            return
        self._counts["replicated"] += 1
        self._unsettle(content.save_id)
        self._log.info(
            "Step %d: %s is on %d peer(s): %s",
            content.step,
            stored.part.name,
            len(self._clique.targets),
            rate(content.size, time.monotonic() - started),
        )

    def _failed(self, stored: StoredPart, why: str) -> None:
        self._counts["unreplicated"] += 1
        self._log.warning(
            "Step %d: rank %d's part of %s stays in this node's memory alone: %s",
            stored.part.content.step,
            stored.part.rank,
            stored.part.name,
            why,
        )

    def _send_to(self, target: int, part: Part, views: dict[str, memoryview]) -> None:
        deadline = time.monotonic() + self._timeout_s
        described = part.to_json()
        if target not in self._to:
            self._made[target] += 1
        offer = self._outgoing.offer(target, self._made[target], len(described))
        try:
            self._await_acceptance(offer, target)
        except PeerError:
            self._outgoing.withdraw(offer)
            raise
        try:
            if target not in self._to:
                self._to[target] = Link(self._outgoing, offer, sends=True, timeout_s=self._message_s)
            self._send_over(self._to[target], part, views, described, deadline)
        except _RefusedError:
            raise
        except BaseException:
            # The other closes its end likewise, and both open another one for the next part.
            self._close(self._to, target)
            raise

    def _send_over(
        self, link: Link, part: Part, views: dict[str, memoryview], described: bytes, deadline: float
    ) -> None:
        step = part.content.step
        link.send(memoryview(bytearray(described)))
        answer = link.hear()
        if answer == _HAVE:
            return
        if answer:
            raise _RefusedError(answer, operation="replicate", step=step)
        for entry in part.content.files:
            for offset, length in entry.chunks:
                if length:
                    link.send(views[entry.basename][offset : offset + length])
                if time.monotonic() > deadline:
                    raise PeerError(f"not sent within {self._timeout_s:.0f} s", operation="replicate", step=step)
        problem = link.hear()
        if problem:
            raise _RefusedError(problem, operation="replicate", step=step)

    @property
    def _message_s(self) -> float:
        return min(self._timeout_s, _MESSAGE_S)

    def _close(self, links: dict[int, Link], rank: int) -> None:
        link = links.pop(rank, None)
        if link is not None:
            link.close()

    def _await_acceptance(self, offer: Offer, target: int) -> None:
        bound = min(self._timeout_s, _ACCEPT_AGAIN_S if target in self._lost else _ACCEPT_S)
        deadline = time.monotonic() + bound
        while not self._outgoing.is_accepted(offer):
            if self._outgoing.has_left(target):
                raise PeerError("it has ended", operation="replicate")
            if time.monotonic() > deadline:
                raise PeerError(f"it does not answer within {bound:.0f} s", operation="replicate")
            time.sleep(_ACCEPT_LOOK_S)

    # --------------------------------------------------------------------------------------- keeping
    def _take_all(self) -> None:
        ended_at: float | None = None
        while True:
            idle = True
            for source in self._clique.sources:
                offer = self._incoming.next_offer(source)
                if offer is not None:
                    idle = False
                    self._take(offer)
            self._settle()
            if self._closing:
                ended_at = ended_at or time.monotonic()
                over = all(self._incoming.has_ended(source) for source in self._clique.sources)
                if idle and (over or time.monotonic() > ended_at + _LINGER_S):
                    self._incoming.leaves()
                    return
            if idle:
                with self._changed:
                    self._changed.wait(_LOOK_S)

    def _take(self, offer: Offer) -> None:
        """Receives one part. A failure concerns its source, which warns of it; here it is only noted."""
        source = offer.source
        try:
            link = self._from.get(source)
            if link is None or link.name != offer.link:
                self._close(self._from, source)
                self._incoming.accept(offer)
                link = self._from[source] = Link(self._incoming, offer, sends=False, timeout_s=self._message_s)
            else:
                self._incoming.accept(offer)
            described = bytearray(offer.size)
            link.receive(memoryview(described))
            try:
                part = Part.from_json(bytes(described), where=f"rank {source}")
                answer = self._taking(part)
                slots = {} if answer else self._slots_for(part)
            except TieredCheckpointError as error:
                answer, slots = str(error), {}
            link.tell(answer)
            if not answer:
                self._receive(link, part, slots)
        except Exception as error:
            self._log.debug("rank %d's part did not arrive: %s", source, error)
            self._close(self._from, source)

    def _taking(self, part: Part) -> str:
        """Whether a part is wanted: empty if so."""
        kept = self._tier.replicas
        if kept.is_taken(part.save_id, part.rank) or self._tier.is_taken(part.save_id, part.rank):
            self._unsettle(part.save_id)
            return _HAVE
        return ""

    def _slots_for(self, part: Part) -> dict[str, Slot]:
        kept = self._tier.replicas
        slots: dict[str, Slot] = {}
        try:
            for entry in part.content.files:
                slots[entry.basename] = self._slot(entry, part)
        except BaseException:
            for slot in slots.values():
                kept.give_back(slot)
            raise
        return slots

    def _slot(self, entry: FileEntry, part: Part) -> Slot:
        kept = self._tier.replicas
        try:
            return kept.acquire(max(1, entry.size))
        except MemoryFullError:
            # One copy fewer of older saves, where that does not cost the only one that is safe.
            self._prune(part, keep_last=max(1, self._keep_last - 1))
            return kept.acquire(max(1, entry.size))

    def _receive(self, link: Link, part: Part, slots: dict[str, Slot]) -> None:
        kept = self._tier.replicas
        damage = ""
        try:
            for entry in part.content.files:
                with slots[entry.basename].view as whole:
                    for index, (offset, length) in enumerate(entry.chunks):
                        with whole[offset : offset + length] as chunk:
                            if length:
                                link.receive(chunk)
                            try:
                                entry.check_chunk(index, chunk, tier="memory", where=f"rank {self._clique.rank}")
                            except CorruptCheckpointError as error:
                                # The source has to get rid of the rest all the same.
                                damage = damage or str(error)
        except BaseException:
            for slot in slots.values():
                kept.give_back(slot)
            raise
        if damage:
            for slot in slots.values():
                kept.give_back(slot)
        else:
            try:
                commit_received(kept, part, slots)
            except MemoryTierError as error:
                # All bytes have come: the link is as good as before.
                damage = str(error)
        link.tell(damage)
        if not damage:
            self._unsettle(part.save_id)
            self._prune(part, keep_last=self._keep_last)

    def _prune(self, part: Part, *, keep_last: int) -> None:
        kept = self._tier.replicas
        held = {
            (stored.save_id, stored.part.rank): stored
            for stored in kept.parts()
            if stored.part.dirpath == part.dirpath and stored.part.content.kind == part.content.kind
        }
        copies = [
            retention.Copy(stored.save_id, stored.part.rank, stored.part.name, stored.replicated)
            for stored in held.values()
        ]
        for copy in retention.outdated_copies(copies, keep_last=keep_last):
            kept.remove(held[copy.save_id, copy.rank])

    # ------------------------------------------------------------------------------------ whole saves
    def _unsettle(self, save_id: str) -> None:
        with self._changed:
            self._unsettled[save_id] = None
            while len(self._unsettled) > _MAX_UNSETTLED:
                del self._unsettled[next(iter(self._unsettled))]

    def _settle(self) -> None:
        """Marks what this node has of the saves that have become whole on peers."""
        with self._changed:
            unsettled = list(self._unsettled)
        for save_id in unsettled:
            if self._incoming.is_whole(save_id):
                for tier in (self._tier, self._tier.replicas):
                    for stored in tier.parts():
                        if stored.save_id == save_id and not stored.replicated:
                            tier.mark_replicated(stored)
                with self._changed:
                    self._unsettled.pop(save_id, None)
                    self._changed.notify_all()

    def _guard(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except PeerError as error:
                # The store is gone with the rank that holds it: the job is at its end.
                self._log.debug("replication ends: %s", error)
            except Exception as error:
                self._log.error("replication ends: %s: %s", type(error).__name__, error)
            finally:
                with self._changed:
                    self._sending = False
                    self._closing = True
                    self._changed.notify_all()

        return run
