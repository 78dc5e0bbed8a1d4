"""The sending end: one part to one peer, over a link of the two that is kept for the next part."""

from __future__ import annotations

import contextlib
from collections import Counter

from tiered_checkpoint_io.engine.ranks.transfer import send_part
from tiered_checkpoint_io.engine.replication.peer_link import HAVE, Board, Link, Offer
from tiered_checkpoint_io.errors import PeerError
from tiered_checkpoint_io.model.manifest import Part


class RefusedError(PeerError):
    """The peer is alive, but could not keep this part."""


class Sender:
    """Sends this rank's parts to peers, on one thread."""

    def __init__(self, board: Board, *, timeout_s: float) -> None:
        """Takes what does not change.

        Args:
            board: Where peers see what is offered to them.
            timeout_s: Bound of one part's way to one peer, seconds.
        """
        self._board = board
        self._clock = board.clock
        self._timeout_s = timeout_s
        #: Peers that did not answer: the next wait for them is short.
        self._lost: set[int] = set()
        #: Of each peer, how many links there were, and the one that is open.
        self._made: Counter[int] = Counter()
        self._links: dict[int, Link] = {}

    def send(self, target: int, part: Part, views: dict[str, memoryview]) -> None:
        """Has a peer keep a part.

        Args:
            target: Which rank.
            part: What it is.
            views: The bytes of its files.

        Raises:
            PeerError: It does not; a ``RefusedError`` where it is alive and could not keep this part.
        """
        try:
            self._send(target, part, views)
        except RefusedError:
            raise
        except PeerError:
            self._lost.add(target)
            raise
        self._lost.discard(target)

    def close(self) -> None:
        """Closes the links."""
        for target in list(self._links):
            self._close(target)

    def _send(self, target: int, part: Part, views: dict[str, memoryview]) -> None:
        deadline = self._clock.monotonic() + self._timeout_s
        described = part.to_json()
        if target not in self._links:
            self._made[target] += 1
        offer = self._board.offer(target, self._made[target], len(described))
        try:
            self._await_acceptance(offer, target)
        except PeerError:
            # Where it does not get there either, the next offer replaces it.
            with contextlib.suppress(PeerError):
                self._board.withdraw(target)
            raise
        try:
            if target not in self._links:
                self._links[target] = Link(self._board, offer, sends=True, timeout_s=self._message_s)
            self._send_over(self._links[target], part, views, described, deadline)
        except RefusedError:
            raise
        except BaseException:
            # The other closes its end likewise, and both open another one for the next part.
            self._close(target)
            raise

    def _send_over(
        self, link: Link, part: Part, views: dict[str, memoryview], described: bytes, deadline: float
    ) -> None:
        link.send(memoryview(bytearray(described)))
        problem = send_part(
            link, part, lambda: contextlib.nullcontext(views), lambda: self._clock.monotonic() > deadline
        )
        if problem and problem != HAVE:
            raise RefusedError(problem, operation="replicate", step=part.content.step)

    @property
    def _message_s(self) -> float:
        return min(self._timeout_s, self._clock.timing.message_s)

    def _close(self, target: int) -> None:
        link = self._links.pop(target, None)
        if link is not None:
            link.close()

    def _await_acceptance(self, offer: Offer, target: int) -> None:
        timing = self._clock.timing
        bound = min(self._timeout_s, timing.accept_again_s if target in self._lost else timing.accept_s)
        deadline = self._clock.monotonic() + bound
        while not self._board.is_accepted(offer):
            if self._board.has_left(target):
                raise PeerError("the peer has ended", operation="replicate")
            if self._clock.monotonic() > deadline:
                raise PeerError(f"the peer did not answer within {bound:.0f} s", operation="replicate")
            self._clock.sleep(timing.accept_poll_s)
