"""The sending end: this rank's parts, one after the other, each to all its peers."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from tiered_checkpoint_io.engine.ranks.store_client import LostStoreError
from tiered_checkpoint_io.engine.ranks.transfer import send_description, send_held_part
from tiered_checkpoint_io.engine.replication.peer_link import HAVE, Links, Member, request
from tiered_checkpoint_io.errors import PeerError
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
        self, member: Member, targets: Sequence[int], counts: Counter[str], on_sent: Callable[[Part], None]
    ) -> None:
        """Starts the thread.

        Args:
            member: This rank.
            targets: The ranks that keep replicas of its parts.
            counts: ``replicated`` and ``unreplicated`` parts.
            on_sent: Called with each part that is on all targets.
        """
        self._member = member
        self._store = member.store
        self._clock = member.clock
        self._log = member.log
        self._targets = targets
        self.counts = counts
        self._on_sent = on_sent
        self._links = Links(member, sends=True)
        #: How often a link to each peer has failed.
        self._broken: Counter[int] = Counter()
        #: Peers that did not answer: the next wait for them is short.
        self._lost: set[int] = set()
        self._changed = threading.Condition()
        self._waiting: deque[StoredPart] = deque()
        self._is_sending = False
        self._is_closing = self._is_over = False
        self._thread = self._clock.start(self._run, "tiered-replicate")

    # ----------------------------------------------------------------------------------- interface
    def offer(self, stored: StoredPart) -> None:
        """Takes a part that has just been committed; returns at once."""
        with self._changed:
            if self._is_closing:
                outdated, why = [stored], "replication has ended"
            else:
                self._waiting.append(stored)
                outdated = [self._waiting.popleft() for _ in range(len(self._waiting) - _MAX_WAITING)]
                why = "replaced by newer saves: peers or network are too slow for this save interval"
                self._changed.notify_all()
        for each in outdated:
            self._failed(each, why)

    @property
    def pending(self) -> int:
        """Parts that are not on their peers yet, and not given up."""
        with self._changed:
            return len(self._waiting) + self._is_sending

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for so many seconds at most, and ends the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._clock.wait_for(
                self._changed, lambda: self._is_over or not (self._waiting or self._is_sending), timeout_s
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
                self._is_sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                # At the end of a job, the store ends with the rank that hosts it, and nothing more can be sent.
                self._is_over = is_store_lost or not self._waiting
                if self._is_over:
                    self._changed.notify_all()
                    break
                stored = self._waiting.popleft()
                self._is_sending = True
            is_store_lost = self._send_to_all(stored) and self._is_closing
        if not is_store_lost:
            with contextlib.suppress(PeerError):
                self._store.set(f"ended/{self._member.rank}")

    def _send_to_all(self, stored: StoredPart) -> bool:
        """Sends a part to all peers; whether the store was lost."""
        part, started = stored.part, self._clock.monotonic()
        problems, is_store_lost = [], False
        for target in self._targets:
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
        if not problems:
            try:
                self._store.add(f"copied/{part.save_id}")
            except LostStoreError as error:
                problems.append(str(error))
                is_store_lost = True
        if problems:
            self._failed(stored, "; ".join(problems))
            return is_store_lost
        self.counts["replicated"] += 1
        self._on_sent(part)
        amount = rate(part.content.size, self._clock.monotonic() - started)
        self._log.info(
            "Step %d: replicated %s to %d peer(s): %s", part.content.step, part.name, len(self._targets), amount
        )
        return False

    def _send(self, target: int, part: Part) -> None:
        """Has a peer keep a part.

        Raises:
            PeerError: It does not; a ``_RefusedError`` where it is alive and could not keep this part.
        """
        member, timing = self._member, self._clock.timing
        deadline = self._clock.monotonic() + member.timeout_s
        key = f"{member.rank}/{target}/{self._broken[target]}"
        request(
            member,
            f"offer/{member.rank}/{target}",
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
        self.counts["unreplicated"] += 1
        part = stored.part
        self._log.warning(
            "Step %d: rank %d's part of %s was not replicated, only this node has it: %s",
            part.content.step,
            part.rank,
            part.name,
            why,
        )
