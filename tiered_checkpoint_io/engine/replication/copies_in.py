"""The receiving end: replicas that this node keeps for others, verified before they are committed."""

from __future__ import annotations

from collections.abc import Callable

from tiered_checkpoint_io.engine.ranks.transfer import SlotPlace, receive_part, send_status
from tiered_checkpoint_io.engine.replication.peer_link import HAVE, Board, Link, Offer
from tiered_checkpoint_io.engine.staging import retention
from tiered_checkpoint_io.errors import MemoryFullError, PeerError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.manifest import Part


class Keeper:
    """Takes what peers offer to this rank, on one thread."""

    def __init__(
        self,
        tier: MemoryTier,
        rank: int,
        board: Board,
        logger: Logger,
        *,
        keep_last: int,
        timeout_s: float,
        on_copy: Callable[[str], None],
    ) -> None:
        """Takes what does not change.

        Args:
            tier: This node's memory.
            rank: This rank, in the group.
            board: Where peers offer parts.
            logger: Where to log.
            keep_last: Of how many saves a peer's copies are kept.
            timeout_s: Bound of one message, seconds.
            on_copy: Called with the save id of each replica that this node now has.
        """
        self._tier = tier
        self._rank = rank
        self._board = board
        self._log = logger
        self._keep_last = keep_last
        self._message_s = min(timeout_s, board.clock.timing.message_s)
        self._on_copy = on_copy
        #: Of each peer, the link that is open.
        self._links: dict[int, Link] = {}

    def close(self) -> None:
        """Ends the links."""
        for source in list(self._links):
            self._close(source)

    def _close(self, source: int) -> None:
        link = self._links.pop(source, None)
        if link is not None:
            link.close()

    def take(self, offer: Offer) -> None:
        """Receives one part. Its source warns of a failure; here it is logged for debugging."""
        source = offer.source
        try:
            link = self._links.get(source)
            if link is None or link.key != offer.link:
                self._close(source)
                self._board.accept(offer)
                link = self._links[source] = Link(self._board, offer, sends=False, timeout_s=self._message_s)
            else:
                self._board.accept(offer)
            described = bytearray(offer.size)
            link.receive(memoryview(described))
            self._receive(link, bytes(described))
        except Exception as error:
            self._log.debug("rank %d's part did not arrive: %s", source, error)
            self._close(source)

    def _receive(self, link: Link, described: bytes) -> None:
        """Receives one part, where it is wanted.

        Raises:
            PeerError: The peer is lost, and the link of no use any more.
        """
        kept = self._tier.replicas
        try:
            part = Part.from_json(described, where=link.name)
        except TieredCheckpointError as error:
            send_status(link, str(error))
            return
        if kept.is_taken(part.save_id, part.rank) or self._tier.is_taken(part.save_id, part.rank):
            send_status(link, HAVE)
            self._on_copy(part.save_id)
            return
        try:
            receive_part(link, part, SlotPlace(kept, part, acquire=lambda size: self._slot(size, part)))
        except PeerError:
            raise
        except TieredCheckpointError as error:
            # The peer knows of it, and is done with this part: the link is as good as before.
            self._log.debug("%s's part is not kept: %s", link.name, error)
            return
        self._on_copy(part.save_id)
        self._prune(part, keep_last=self._keep_last)

    def _slot(self, size: int, part: Part) -> Slot:
        kept = self._tier.replicas
        try:
            return kept.acquire(size)
        except MemoryFullError:
            # Keep one replica fewer, unless that is the only one of a complete save.
            self._prune(part, keep_last=max(1, self._keep_last - 1))
            return kept.acquire(size)

    def _prune(self, part: Part, *, keep_last: int) -> None:
        kept = self._tier.replicas
        of_kind = [
            stored
            for stored in kept.parts()
            if stored.part.dirpath == part.dirpath and stored.part.content.kind == part.content.kind
        ]
        for stored in retention.outdated_replicas(of_kind, keep=keep_last):
            kept.remove(stored)
