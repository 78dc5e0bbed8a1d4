"""The receiving end: replicas that this node keeps for others, verified before they are committed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from tiered_checkpoint_io.engine.ranks.store_client import PeerError
from tiered_checkpoint_io.engine.ranks.transfer import (
    SlotDestination,
    receive_description,
    receive_part,
    send_status,
    text_of,
)
from tiered_checkpoint_io.engine.replication.fates import Fates, form_key, newest_of
from tiered_checkpoint_io.engine.replication.peer_link import HAVE, Link, Links, Member, take_request
from tiered_checkpoint_io.engine.staging.retention import form_of, outdated_replicas
from tiered_checkpoint_io.errors import CorruptCheckpointError, TieredCheckpointError
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.space import MemoryFullError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part


class ReplicaReceiver:
    """Takes what peers offer to this rank, on a thread of its own."""

    def __init__(self, member: Member, sources: Sequence[int], fates: Fates) -> None:
        """Starts the thread; ``sources`` are the ranks of whose parts it keeps replicas."""
        self._tier = member.tier
        self._store = member.store
        self._rank = member.rank
        self._log = member.log
        self._clock = member.clock
        self._keep_last = member.config.memory_keep_last
        self._sources = sources
        self._links = Links(member, sends=False)
        self._fates = fates
        self._missed = 0
        held = [*self._tier.parts(), *self._tier.replicas.parts()]
        #: The newest save of each form that this node had when the ranks met.
        self._newest_before = newest_of((form_key(stored.part), stored.save_id) for stored in held)
        self._is_closing = False
        #: Ends a pause.
        self._bell = threading.Event()
        #: When there was something to receive, or about to be.
        self._news_at = self._clock.monotonic()
        self._thread = self._clock.start(self._run, "tiered-keep-replicas")

    def wake(self) -> None:
        """This rank has saved, and so have its sources, or are about to: looks often again."""
        self._news_at = self._clock.monotonic()
        self._bell.set()

    def close(self) -> None:
        """Takes what is being sent to this rank, and ends the thread."""
        self._is_closing = True
        self.wake()
        self._clock.join(self._thread, self._clock.timing.replication_linger_s + self._clock.timing.message_s)
        self._links.close_all()

    def _run(self) -> None:
        timing, ended_at = self._clock.timing, None
        while True:
            is_closing, idle, over, unreachable = self._is_closing, True, False, ""
            try:
                for source in self._sources:
                    key = take_request(self._store, f"offer/{source}/{self._rank}")
                    if key is not None:
                        idle, self._news_at = False, self._clock.monotonic()
                        self._take(source, key)
                self._fates.look()
                over = is_closing and all(self._store.get(f"ended/{source}") for source in self._sources)
            except Exception as error:
                unreachable = text_of(error)
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
                self._store.set(f"left/{self._rank}")

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

    # ------------------------------------------------------------------------------------- receiving
    def _take(self, source: int, key: str) -> None:
        """Receives one part. Its source warns of a failure; here it is logged for debugging."""
        try:
            self._receive(self._links.open(source, key))
        except Exception as error:
            self._log.debug("rank %d's part did not arrive: %s", source, error)
            self._links.close(source)

    def _receive(self, link: Link) -> None:
        """Receives one part, where it is wanted.

        Raises:
            PeerError: The peer is lost, and the link of no use any more.
        """
        kept = self._tier.replicas
        try:
            part = receive_description(link)
        except CorruptCheckpointError as error:
            send_status(link, str(error))
            return
        # From here on it stays, so that its source may count it.
        self._fates.begin(part)
        if kept.is_taken(part.save_id, part.rank) or self._tier.is_taken(part.save_id, part.rank):
            send_status(link, HAVE)
            return
        try:
            receive_part(link, part, SlotDestination(kept, part, acquire=lambda size: self._slot(size, part)))
        except PeerError:
            raise
        except TieredCheckpointError as error:
            # The peer knows of it, and is done with this part: the link is as good as before.
            self._log.debug("%s's part is not kept: %s", link.name, error)
            return
        self._fates.arrived(part)
        if not self._is_left_over(part):
            self._prune(part, keep=self._keep_last)

    def _slot(self, size: int, part: Part) -> Slot:
        kept = self._tier.replicas
        try:
            return kept.acquire(size)
        except MemoryFullError:
            if self._is_left_over(part):
                raise
            # Keep one replica fewer, unless that is the only one of a complete save.
            self._prune(part, keep=max(1, self._keep_last - 1))
            return kept.acquire(size)

    def _is_left_over(self, part: Part) -> bool:
        """Whether an earlier run saved it: until this one saves, the ranks may be loading an older one than that."""
        return part.save_id <= self._newest_before.get(form_key(part), "")

    def _prune(self, part: Part, *, keep: int) -> None:
        """Removes what is outdated of the replicas that this rank keeps, and of those of earlier runs."""
        kept, form, run = self._tier.replicas, form_of(part), ids.line_of(part.save_id)
        held = [stored for stored in kept.parts() if stored.part.place == part.place]
        for stored in outdated_replicas(held, keep=keep):
            own = stored.part.rank in self._sources and form_of(stored.part) == form
            if own or ids.line_of(stored.save_id) != run:
                kept.remove(stored)
