"""One rank's part of a sharded save, from its capture to the moment at which it exists."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tiered_checkpoint_io.engine.durable.direct_shards import DirectFile, DirectSlot
from tiered_checkpoint_io.engine.saving.past_memory import bring
from tiered_checkpoint_io.engine.saving.tickets import Ticket
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.saver import versions
from tiered_checkpoint_io.errors import MemoryFullError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.model.hashing import chunk_ranges, chunk_size_for, hash_bytes
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part


@dataclass(slots=True)
class Unsealed:
    """A part that is captured, but not committed; the coordinator's, until the other ranks have reported.

    Attributes:
        ticket: Of the save.
        rank: Whose part it is.
        image: Its file; of no bytes where the rank has none.
        slot: Where that lies.
        hashes: Of its chunks; None where they are still to be made.
        started: When the save began, by the monotonic clock.
        threads: How many hash.
        is_behind: Whether it is committed behind its save.
        direct: Its file, where memory has no room for it.
        left_memory: Whether it went from there straight to the durable tier, for want of room for its description.
        small: Its other files; None where they are still to come.
    """

    ticket: Ticket
    rank: int
    image: Image | None
    slot: Slot | None
    hashes: tuple[str, ...] | None
    started: float
    threads: int | None
    is_behind: bool
    direct: DirectFile | None = None
    small: dict[str, bytes] | None = None
    left_memory: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether it goes past node memory."""
        return self.direct is not None or self.left_memory

    def seal(self, session: Session, small: Mapping[str, bytes]) -> None:
        """Hashes what is not, and makes the part exist: in memory, or where that has no room on the durable tier.

        Args:
            session: Both tiers.
            small: Its other files.

        Raises:
            MemoryFullError: There is no room, and it is not meant for the durable tier.
            TieredCheckpointError: It did not reach the durable tier, where it had to go there at once.
        """
        tier, saver, drain = session.open()
        try:
            part = self._describe(session, small)
            if self.direct is not None:
                bring(session, part, self.direct, small)
                return
        except BaseException:
            self.give_back(session)
            raise
        slots = {self.ticket.file_name(self.rank): self.slot} if self.slot is not None else {}
        try:
            tier.commit(part, {**small, **slots}, keep_slots=part.durable)
        except MemoryFullError as error:
            if not part.durable:
                # The tier has given up the slot as well.
                raise
            self._leave_memory(session, part, small, error)
            return
        except BaseException:
            self.give_back(session)
            raise
        if part.durable:
            # It may have left while it had nothing to do.
            drain.start()
        if self.image is not None:
            saver.prepare(self.image.size)

    def _describe(self, session: Session, small: Mapping[str, bytes]) -> Part:
        ticket = self.ticket
        files = [_small_entry(f"{ticket.name}/{basename}", data) for basename, data in small.items()]
        if self.image is not None:
            hashes = self.hashes or ()
            if self.slot is not None and not hashes:
                hashes = self.image.hashes(self.slot.view, threads=self.threads)
            path = f"{ticket.name}/{ticket.file_name(self.rank)}"
            files.insert(0, FileEntry(path, self.image.size, self.image.chunk_size, hashes))
        content = Content(
            save_id=ticket.save_id,
            step=ticket.step,
            epoch=ticket.epoch,
            kind="sharded",
            created=time.time(),
            world_size=ticket.world_size,
            writer=versions(),
            files=tuple(files),
            metric=ticket.metric,
        )
        return Part(ticket.name, self.rank, content, session.dirpath, ticket.durable)

    def _leave_memory(self, session: Session, part: Part, small: Mapping[str, bytes], reason: MemoryFullError) -> None:
        """Brings to the durable tier what lies in memory already, but has no room there for its description."""
        self.left_memory = True
        try:
            session.warn_small(reason)
        except BaseException:
            self.give_back(session)
            raise
        image, slot, tier = self.image, self.slot, session.open().tier
        file = DirectSlot(tier, slot, image.size) if image is not None and slot is not None else None
        bring(session, part, file, small)

    def give_back(self, session: Session) -> None:
        """Frees what it holds."""
        if self.slot is not None:
            session.open().tier.give_back(self.slot)
        if self.direct is not None:
            self.direct.close()


def _small_entry(path: str, data: bytes) -> FileEntry:
    view, chunk_size = memoryview(data), chunk_size_for(len(data))
    hashes = tuple(hash_bytes(view[offset : offset + length]) for offset, length in chunk_ranges(len(data), chunk_size))
    return FileEntry(path, len(data), chunk_size, hashes)
