"""Replicas of this rank's parts in the memory of peers on other nodes, made in the background.

Two threads: one sends parts, one after the other, each to all its peers; the other receives what is offered to
this rank. Neither takes part in a collective. The receiver commits a replica once all its hashes match. A failure
costs a warning and a count, ``unreplicated``: the part stays in this node's memory, and training goes on.

A part is marked as replicated once *all* parts of its save are on all their peers: only then is the save
safe from the loss of a node, and only then may the safe one before it go. Each rank counts its part on the
board when it is done, and looks there for the saves that it has parts or copies of.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.engine.replication.copies_in import Keeper
from tiered_checkpoint_io.engine.replication.copies_out import Sender
from tiered_checkpoint_io.engine.replication.peer_link import Board
from tiered_checkpoint_io.errors import PeerError
from tiered_checkpoint_io.logs import Logger, rate
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart

#: Parts that wait to be sent; of more, the oldest are outdated.
_MAX_WAITING = 2
#: Saves of which it is not known yet whether all parts are replicated.
_MAX_UNSETTLED = 16


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
        self._clock = self._outgoing.clock
        self._log = logger
        self._counts = counts
        self._sender = Sender(self._outgoing, timeout_s=timeout_s)
        self._keeper = Keeper(
            tier, clique.rank, self._incoming, logger, keep_last=keep_last, timeout_s=timeout_s, on_copy=self._unsettle
        )
        self._changed = threading.Condition()
        self._waiting: deque[StoredPart] = deque()
        self._sending = False
        self._closing = False
        self._missed = 0
        self._unsettled: dict[str, None] = {}
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
            if self._closing:
                self._failed(stored, "replication has ended")
                return
            self._waiting.append(stored)
            outdated = [self._waiting.popleft() for _ in range(len(self._waiting) - _MAX_WAITING)]
            self._changed.notify_all()
        for each in outdated:
            self._failed(
                each, "replaced by newer saves before it was sent: peers or network are too slow for this save interval"
            )

    @property
    def pending(self) -> int:
        """Parts that are not on their peers yet, and not given up."""
        with self._changed:
            return len(self._waiting) + self._sending

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is on its way to peers; False where that took too long."""
        with self._changed:
            return self._clock.wait_for(self._changed, lambda: not self._waiting and not self._sending, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Sends what waits, takes what is being sent to this rank, and ends both threads.

        Args:
            timeout_s: Bound of the wait for what is to be sent, seconds.
        """
        timing = self._clock.timing
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            for each in self._waiting:
                self._failed(each, "the process has ended")
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            self._clock.join(thread, timing.replication_linger_s + timing.message_s)
        self._sender.close()
        self._keeper.close()
        for board in (self._outgoing, self._incoming):
            board.close()

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
        content, started = stored.part.content, self._clock.monotonic()
        problems = []
        for target in self._clique.targets:
            try:
                with self._tier.reading(stored) as views:
                    self._sender.send(target, stored.part, views)
            except Exception as error:
                problems.append(f"rank {target}: {error}")
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
            "Step %d: replicated %s to %d peer(s): %s",
            content.step,
            stored.part.name,
            len(self._clique.targets),
            rate(content.size, self._clock.monotonic() - started),
        )

    def _failed(self, stored: StoredPart, why: str) -> None:
        self._counts["unreplicated"] += 1
        self._log.warning(
            "Step %d: rank %d's part of %s was not replicated, only this node has it: %s",
            stored.part.content.step,
            stored.part.rank,
            stored.part.name,
            why,
        )

    # --------------------------------------------------------------------------------------- keeping
    def _take_all(self) -> None:
        timing, ended_at = self._clock.timing, None
        while True:
            idle, unreachable, over = True, "", False
            try:
                for source in self._clique.sources:
                    offer = self._incoming.next_offer(source)
                    if offer is not None:
                        idle = False
                        self._keeper.take(offer)
                self._settle()
                over = self._closing and all(self._incoming.has_ended(source) for source in self._clique.sources)
            except PeerError as error:
                unreachable = str(error)
            self._tell_of_board(unreachable)
            if self._closing:
                ended_at = ended_at or self._clock.monotonic()
                if idle and (over or unreachable or self._clock.monotonic() > ended_at + timing.replication_linger_s):
                    if not unreachable:
                        with contextlib.suppress(PeerError):
                            self._incoming.leaves()
                    return
            if idle:
                with self._changed:
                    self._clock.wait(self._changed, timing.offer_retry_s if unreachable else timing.offer_poll_s)

    def _tell_of_board(self, unreachable: str) -> None:
        """Warns once when the board does not answer, and logs once when it does again."""
        if not unreachable:
            if self._missed > 1:
                self._log.info("receiving replicas again")
            self._missed = 0
            return
        self._missed += 1
        # At the end of a job, the store ends with the rank that hosts it.
        if self._missed == 2 and not self._closing:
            self._log.warning("receiving no replicas for now: %s", unreachable)

    # ------------------------------------------------------------------------------------ whole saves
    def _unsettle(self, save_id: str) -> None:
        with self._changed:
            self._unsettled[save_id] = None
            while len(self._unsettled) > _MAX_UNSETTLED:
                del self._unsettled[next(iter(self._unsettled))]

    def _settle(self) -> None:
        """Marks this node's parts and replicas of the saves that are complete on all peers."""
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
                self._log.debug("replication has ended: %s", error)
            except Exception as error:
                self._log.error("replication has ended: %s: %s", type(error).__name__, error)
            finally:
                with self._changed:
                    self._sending = False
                    self._closing = True
                    self._changed.notify_all()

        return run
