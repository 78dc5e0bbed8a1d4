"""One rank's part of a save, carried out: capture, seal, wait, report.

The same for all payloads: a planned file is *captured* into a slot of node memory; *sealed*, that is hashed, described
and renamed into place, from when on the part exists, and where it is durable its upload is queued; and reported. Where
memory has no room for a durable save, the part is sent straight to the durable tier instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.engine.save.direct import DirectFile, DirectSlot, Watching, nothing_missing, send
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.retention import Evidence
from tiered_checkpoint_io.errors import MemoryFullError, SaveError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.hashing import chunk_ranges, chunk_size_for, hash_bytes
from tiered_checkpoint_io.model.manifest import FileEntry, Part


@dataclass(slots=True)
class PartSave:
    """A part on its way.

    Attributes:
        session: Both tiers.
        facts: Of the save.
        rank: Whose part it is.
        image: Its file, planned; None where the rank has none.
        threads: How many copy and hash.
        started: When the save began, by the monotonic clock; now by default.
        slot: Where the file lies.
        hashes: Of its chunks; empty where they are still to be made.
        direct: Its file, where memory has no room for it.
        part: Its description, once it is sealed.
    """

    session: Session
    facts: SaveFacts
    rank: int
    image: Image | None
    threads: int | None = None
    started: float = 0.0
    slot: Slot | None = None
    hashes: tuple[str, ...] = ()
    direct: DirectFile | DirectSlot | None = None
    part: Part | None = None
    _left_memory: bool = False

    def __post_init__(self) -> None:
        self.started = self.started or self.session.clock.monotonic()

    @property
    def in_memory(self) -> bool:
        """Whether memory has, or gets, the part."""
        return self.direct is None and not self._left_memory

    @property
    def is_queued(self) -> bool:
        """Whether the drain uploads it."""
        return self.facts.durable and self.in_memory

    @property
    def op_id(self) -> str | None:
        """The drain's operation that uploads it; None where none does."""
        commits = self.rank == self.facts.coordinator
        return ids.part_op_id(self.facts.save_id, self.rank, commits=commits) if self.is_queued else None

    # ---------------------------------------------------------------------------------- capture
    def retain(self, held: list[StoredPart], keep: int, evidence: Evidence, *, size: int | None = None) -> None:
        """Removes what memory need not keep; see :meth:`Capturer.retain`."""
        scope = self.facts.scope(self.rank, self.session.dirpath)
        self.session.open().capturer.retain(held, scope, keep, evidence, size=size)

    def capture(self, *, retained: tuple[str, ...] = (), hashed: bool = True) -> None:
        """Copies the state. When this returns, later changes to the tensors do not affect the checkpoint.

        Args:
            retained: Ids of saves that must not make room for it.
            hashed: Whether it is hashed while it is copied, and not by :meth:`seal`.

        Raises:
            MemoryFullError: No room in memory, and the save is of memory alone; or no memory left at all.
        """
        if self.image is None:
            return
        _, capturer, drain = self.session.open()
        scope = self.facts.scope(self.rank, self.session.dirpath)
        try:
            if self.facts.durable:
                drain.start()
            self.slot, self.hashes = capturer.capture(
                self.image, scope, retained=retained, threads=self.threads, hashed=hashed
            )
        except MemoryFullError as error:
            if not self.facts.durable:
                raise
            self.session.warn_small(error)
            self.direct = DirectFile(self.image, threads=self.threads)
            self.hashes = self.direct.hashes

    # ------------------------------------------------------------------------------------- seal
    def seal(self, small: Mapping[str, bytes] | None = None, watching: Watching = nothing_missing) -> None:
        """Makes the part exist: in memory, or where that has no room, on the durable tier.

        Args:
            small: Its other files, by basename.
            watching: See :func:`send`.

        Raises:
            MemoryFullError: There is no room, and it is not meant for the durable tier.
            SaveError: It did not reach the durable tier, where it had to go there at once.
        """
        self.commit(small)
        self.finish(small, watching)

    def commit(self, small: Mapping[str, bytes] | None = None) -> None:
        """The first half of :meth:`seal`: all but what is sent straight to the durable tier."""
        tier, _, drain = self.session.open()
        small = small or {}
        try:
            self.part = self._describe(small)
            if self.direct is not None:
                return
            slots = {self.facts.file_name(self.rank): self.slot} if self.slot is not None else {}
            tier.commit(self.part, {**small, **slots}, keep_slots=self.facts.durable)
        except MemoryFullError as error:
            if not self.facts.durable:
                # The tier has given up the slot as well.
                raise
            self._leave_memory(error)
            return
        except BaseException:
            self.give_back()
            raise
        self.slot = None
        if self.facts.durable:
            # It may have left while it had nothing to do.
            drain.start()

    def finish(self, small: Mapping[str, bytes] | None = None, watching: Watching = nothing_missing) -> None:
        """The second half: sends to the durable tier what memory has no room for, or prepares the next save's slot."""
        if self.in_memory:
            if self.image is not None:
                self.session.open().capturer.prepare(self.image.size)
            return
        assert self.part is not None
        try:
            send(self.session, self.part, self.direct, small or {}, watching)
        except SaveError:
            raise
        except Exception as error:
            raise SaveError(
                f"{self._label} did not reach the durable tier, and memory has no room for it: {error}",
                operation="save",
                tier="durable",
                key=ids.join_url(self.session.dirpath, self.facts.name),
                rank=self.rank,
                step=self.facts.step,
                hint="it is lost, and what was saved before is as it was; give memory_dir more space",
            ) from error

    def _describe(self, small: Mapping[str, bytes]) -> Part:
        files = [_small_entry(f"{self.facts.name}/{basename}", data) for basename, data in small.items()]
        if self.image is not None:
            if self.slot is not None and not self.hashes:
                self.hashes = self.image.hashes(self.slot.view, threads=self.threads)
            entry = FileEntry(self.facts.path(self.rank), self.image.size, self.image.chunk_size, self.hashes)
            files.insert(0, entry)
        config = self.session.config
        return self.facts.describe(
            self.rank, self.session.dirpath, tuple(files), created=self.session.clock.wall(), namespace=config.namespace
        )

    def _leave_memory(self, reason: MemoryFullError) -> None:
        """Has what lies in memory already sent from there: there is no room for its description."""
        try:
            self.session.warn_small(reason)
        except BaseException:
            self.give_back()
            raise
        self._left_memory = True
        if self.image is not None and self.slot is not None:
            self.direct = DirectSlot(self.session.open().tier, self.slot, self.image.size)

    def give_back(self) -> None:
        """Frees what it holds."""
        if self.direct is not None:
            self.direct.close()
        elif self.slot is not None:
            self.session.open().tier.give_back(self.slot)

    # ----------------------------------------------------------------------------------- report
    def wait(self) -> None:
        """Waits until the durable tier has what the drain uploads.

        Raises:
            SaveError: It does not get there.
            DrainError: It is not there within ``wait_timeout_s``.
        """
        if self.op_id is None:
            return
        outcome = self.session.open().drain.wait(self.op_id, self.session.config.wait_timeout_s)
        if outcome.state != "committed":
            raise SaveError(
                f"{self.facts.name} is in memory, but not on the durable tier: {outcome.error}",
                operation="save",
                tier="durable",
                key=ids.join_url(self.session.dirpath, self.facts.name),
                step=self.facts.step,
            )

    def report(self, *, small: int = 0, waited: bool = False, background: bool = False) -> SaveReport:
        """Counts and logs the save.

        Args:
            small: Bytes of its other files.
            waited: Whether the upload has been waited for.
            background: Whether the rest of it is left to a background task.
        """
        session, facts = self.session, self.facts
        size = (self.image.size if self.image is not None else 0) + small
        stall = self.session.clock.monotonic() - self.started
        tiers = frozenset(({"durable"} if facts.durable else set()) | ({"memory"} if self.in_memory else set()))
        session.counts["saved"] += 1
        # What memory has no room for is there by now, unless a background task sends it.
        queued = facts.durable and not waited and (self.in_memory or background)
        report = SaveReport(facts.name, facts.step, facts.save_id, size, stall, tiers, queued)
        session.last_save = report
        session.log.at_step(facts.step).info(report.line(session.dirpath, self._label))
        return report

    @property
    def _label(self) -> str:
        return self.facts.name if self.facts.payload == "full" else f"shard {self.rank} of {self.facts.name}"


def _small_entry(path: str, data: bytes) -> FileEntry:
    view, chunk_size = memoryview(data), chunk_size_for(len(data))
    hashes = tuple(hash_bytes(view[offset : offset + length]) for offset, length in chunk_ranges(len(data), chunk_size))
    return FileEntry(path, len(data), chunk_size, hashes)
