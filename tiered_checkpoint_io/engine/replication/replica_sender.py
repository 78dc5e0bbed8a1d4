"""The sending end: this rank's parts, one after the other, each to all its peers."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from tiered_checkpoint_io.engine.ranks.store_client import LostStoreError, PeerError
from tiered_checkpoint_io.engine.ranks.transfer import send_description, send_held_part
from tiered_checkpoint_io.engine.replication.fates import Fates
from tiered_checkpoint_io.engine.replication.peer_link import HAVE, Links, Member, request
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model.manifest import Part

#: Parts that wait to be sent; of more, the oldest are outdated.
_MAX_WAITING = 2


class _RefusedError(PeerError):
    """The peer is alive, but could not keep this part."""


class ReplicaSender:
    """Sends this rank's parts to its peers, on a thread of its own.

    A failure costs a warning and a count: the part stays in this node's memory, and training goes on.
    """

    def __init__(
        self,
        member: Member,
        targets: Sequence[int],
        counts: Counter[str],
        fates: Fates,
        on_offer: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
            member: This rank.
            targets: The ranks that keep replicas of its parts.
            counts: ``replicated`` and ``unreplicated`` parts.
            fates: Learns of each part that is on all targets, or never will be.
            on_offer: Called with each part that this rank has saved.
        """
        self._member = member
        self._store = member.store
        self._clock = member.clock
        self._log = member.log
        self._targets = targets
        self.counts = counts
        self._fates = fates
        self._on_offer = on_offer
        self._links = Links(member, sends=True)
        #: How often a link to each peer has failed.
        self._broken: Counter[int] = Counter()
        #: Peers that did not answer: the next wait for them is short.
        self._lost: set[int] = set()
        self._changed = threading.Condition()
        self._waiting: deque[StoredPart] = deque()
        self._sending: StoredPart | None = None
        #: Saves of an earlier start, which some peers lack; whether they are replicated is known.
        self._again: set[str] = set()
        self._is_closing = self._is_over = False
        self._thread = self._clock.start(self._run, "tiered-replicate")

    # ----------------------------------------------------------------------------------- interface
    def offer(self, stored: StoredPart, *, again: bool = False) -> None:
        """Takes a part that has just been committed; returns at once.

        ``again``: it is of an earlier start, and does not count for whether its save is replicated.
        """
        with self._changed:
            self._again.update([stored.save_id] if again else [])
            if self._is_closing:
                outdated, why = [stored], "replication has ended"
            else:
                self._waiting.append(stored)
                # Those of an earlier start are as many as were lost, and outdated by none.
                fresh = [each for each in self._waiting if each.save_id not in self._again]
                outdated = fresh[:-_MAX_WAITING]
                for each in outdated:
                    self._waiting.remove(each)
                why = "replaced by newer saves: peers or network are too slow for this save interval"
                self._changed.notify_all()
        for each in outdated:
            self._failed(each, why)
        self._on_offer()

    @property
    def pending(self) -> int:
        """Parts that are not on their peers yet, and not given up."""
        with self._changed:
            return len(self._waiting) + (self._sending is not None)

    def awaited(self, urgent: bool) -> set[str]:
        """The saves of which no part may be removed, because they are replicated, or may become so.

        ``urgent``: room is needed, so of parts that are not being sent yet, only the newest goes on waiting.
        """
        with self._changed:
            spared = [self._waiting.popleft() for _ in range(len(self._waiting) - 1)] if urgent else []
            own = {each.save_id for each in (*self._waiting, self._sending) if each is not None}
        for each in spared:
            self._failed(each, "memory had no room to keep it until then")
        # Asked for last: what is sent next is already among these.
        return own | self._fates.awaited()

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for so many seconds at most, and ends the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._clock.wait_for(
                self._changed, lambda: self._is_over or not (self._waiting or self._sending), timeout_s
            )
            left = list(self._waiting)
            self._waiting.clear()
        for each in left:
            self._failed(each, "the process has ended")
        self._clock.join(self._thread, self._clock.timing.replication_linger_s + self._clock.timing.message_s)
        self._links.close_all()

    # --------------------------------------------------------------------------------------- sending
    def _run(self) -> None:
        is_store_lost = False
        while True:
            with self._changed:
                self._sending = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                # At the end of a job, the store ends with the rank that hosts it, and nothing more can be sent.
                self._is_over = is_store_lost or not self._waiting
                if self._is_over:
                    self._changed.notify_all()
                    break
                stored = self._sending = self._waiting.popleft()
            is_store_lost = self._send_to_all(stored) and self._is_closing
        if not is_store_lost:
            with contextlib.suppress(PeerError):
                self._store.set(f"ended/{self._member.rank}")

    def _send_to_all(self, stored: StoredPart) -> bool:
        """Sends a part to all peers; whether the store was lost."""
        part, started = stored.part, self._clock.monotonic()
        counts, problems, is_store_lost = part.save_id not in self._again, [], False
        try:
            if counts and not self._fates.begin(part):
                problems.append("another rank has given up this save")
        except LostStoreError as error:
            problems, is_store_lost = [str(error)], True
        for target in self._targets if not problems else ():
            try:
                self._send(target, part)
                self._lost.discard(target)
            except _RefusedError as error:
                problems.append(f"rank {target}: {error}")
            except Exception as error:
                # The other end closes likewise, and both open another link for the next part.
                self._links.close(target)
                self._broken[target] += 1
                self._lost.add(target)
                problems.append(f"rank {target}: {error}")
                is_store_lost = isinstance(error, LostStoreError)
                if is_store_lost:
                    break
        if problems or not counts:
            self._fates.drop(part)
        else:
            try:
                self._fates.count(part)
            except LostStoreError as error:
                # Without an answer, it may have been counted, and stays until that is known.
                problems, is_store_lost = [str(error)], True
        if problems:
            self._warn(stored, "; ".join(problems))
            return is_store_lost
        self.counts["replicated"] += 1
        amount = rate(part.content.size, self._clock.monotonic() - started)
        self._log.info(
            "Step %d: replicated %s to %d peer(s): %s", part.content.step, part.name, len(self._targets), amount
        )
        return counts and self._await_others(part)

    def _await_others(self, part: Part) -> bool:
        """Waits until a save is decided, so that the ranks send parts of the same one; whether the store was lost.

        Without it, ranks of different speed would each send other saves, and none would ever be replicated.
        """
        deadline = self._clock.monotonic() + self._clock.timing.others_send_s
        try:
            self._fates.is_decided(part)
        except LostStoreError:
            return True
        # From here on, the receiving end asks the store for both.
        while self._fates.is_open(part) and not self._is_closing and self._clock.monotonic() < deadline:
            self._clock.sleep(self._clock.timing.offer_poll_s)
        return False

    def _send(self, target: int, part: Part) -> None:
        """Has a peer keep a part.

        Raises:
            PeerError: It does not; a ``_RefusedError`` where it is alive and could not keep this part.
        """
        member, timing = self._member, self._clock.timing
        deadline = self._clock.monotonic() + member.timeout_s
        key, offer = f"{member.rank}/{target}/{self._broken[target]}", f"offer/{member.rank}/{target}"
        request(
            member,
            offer,
            key,
            bound_s=min(member.timeout_s, timing.accept_again_s if target in self._lost else timing.accept_s),
            poll_s=timing.accept_poll_s,
            has_left=lambda: self._store.get(f"left/{target}") is not None,
        )
        link = self._links.open(target, key)
        send_description(link, part)
        problem = send_held_part(link, member.tier, part, lambda: self._clock.monotonic() > deadline)
        if problem and problem != HAVE:
            raise _RefusedError(problem, operation="replicate", step=part.content.step)

    def _failed(self, stored: StoredPart, why: str) -> None:
        self._fates.drop(stored.part)
        self._warn(stored, why)

    def _warn(self, stored: StoredPart, why: str) -> None:
        self.counts["unreplicated"] += 1
        part = stored.part
        self._log.warning(
            "Step %d: rank %d's part of %s was not replicated, only this node has it: %s",
            part.content.step,
            part.rank,
            part.name,
            why,
        )
