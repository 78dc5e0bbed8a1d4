"""The receiving end: replicas that this node keeps for others, verified before they are committed."""

from __future__ import annotations

from collections.abc import Callable

from tiered_checkpoint_io.engine.ranks.carrying import commit_received
from tiered_checkpoint_io.engine.replication.peer_link import HAVE, Board, Link, Offer, receive_files
from tiered_checkpoint_io.engine.staging import retention
from tiered_checkpoint_io.errors import MemoryFullError, MemoryTierError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.manifest import FileEntry, Part


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
            if link is None or link.name != offer.link:
                self._close(source)
                self._board.accept(offer)
                link = self._links[source] = Link(self._board, offer, sends=False, timeout_s=self._message_s)
            else:
                self._board.accept(offer)
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
            self._close(source)

    def _taking(self, part: Part) -> str:
        """Whether a part is wanted: empty if so."""
        kept = self._tier.replicas
        if kept.is_taken(part.save_id, part.rank) or self._tier.is_taken(part.save_id, part.rank):
            self._on_copy(part.save_id)
            return HAVE
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
            # Keep one replica fewer, unless that is the only one of a complete save.
            self._prune(part, keep_last=max(1, self._keep_last - 1))
            return kept.acquire(max(1, entry.size))

    def _receive(self, link: Link, part: Part, slots: dict[str, Slot]) -> None:
        kept = self._tier.replicas
        try:
            damaged = receive_files(link, part, slots, f"rank {self._rank}")
        except BaseException:
            for slot in slots.values():
                kept.give_back(slot)
            raise
        damage = str(damaged or "")
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
            self._on_copy(part.save_id)
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
