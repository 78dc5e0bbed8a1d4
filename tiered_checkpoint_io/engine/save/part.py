"""One rank's part of a save, carried out: capture, seal, wait, report.

The same for all payloads: a planned file is *captured* into a slot of node memory, or of the spill if that has no
room; *sealed*, that is hashed, described and renamed into place, from when on the part exists, and if it is durable
its upload is queued; and reported. If neither has room, the save fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiered_checkpoint_io.engine.chunks import hashed
from tiered_checkpoint_io.engine.drain.operations import RETENTION
from tiered_checkpoint_io.engine.drain.status import SaveReport, StandstillError
from tiered_checkpoint_io.engine.save.facts import SaveFacts, needing_room, warn_spilled, why_left_out
from tiered_checkpoint_io.engine.save.overlap import Overlapped
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.retention import Evidence
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.spill import AUTO
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry, Part


@dataclass(slots=True)
class PartSave:
    """A part during its save.

    Attributes:
        session: Both tiers.
        facts: Facts of the save.
        rank: Rank of the part.
        image: Its file, planned; None if the rank has none.
        threads: Number of threads that copy and hash.
        started: When the save began, by the monotonic clock; now by default.
        slot: Slot of the file, until the part exists.
        hashes: Hashes of its chunks; empty if they are still to be made.
        spilled: True if it is in the spill.
        capture_s: Time of the copy, seconds.
        overlapped: The overlapped capture in progress, if any.
    """

    session: Session
    facts: SaveFacts
    rank: int
    image: Image | None
    threads: int | None = None
    started: float = 0.0
    slot: Slot | None = None
    hashes: tuple[str, ...] = ()
    spilled: bool = False
    capture_s: float = 0.0
    overlapped: Overlapped | None = None

    def __post_init__(self) -> None:
        self.started = self.started or self.session.clock.monotonic()

    @property
    def op_id(self) -> str | None:
        """The drain's operation that uploads it; None if none does."""
        if not self.facts.durable:
            return None
        return ids.part_op_id(self.facts.save_id, self.rank, commits=self.rank == self.facts.coordinator)

    # ---------------------------------------------------------------------------------- capture
    def retain(self, held: list[StoredPart], keep: int, evidence: Evidence, *, size: int | None = None) -> None:
        """Removes parts that memory need not keep; see :meth:`Capturer.retain`."""
        scope = self.facts.scope(self.rank, self.session.place)
        self.session.open().capturer.retain(held, scope, keep, evidence, size=size)

    def capture(self, *, retained: tuple[str, ...] = (), hashed: bool = True) -> None:
        """Copies the state; later changes to the tensors do not affect the checkpoint.

        Args:
            retained: Ids of saves that must not make room for it.
            hashed: True if the state is hashed during the copy, and not by :meth:`seal`.

        Raises:
            MemoryFullError: Neither memory nor the spill has room; the save is memory-only.
            SaveError: The same, for a durable save.
        """
        self.reserve(retained=retained)
        self.fill(hashed=hashed)

    def reserve(self, *, retained: tuple[str, ...] = ()) -> None:
        """Takes a slot for the state, unless the part has one; raises as :meth:`capture`."""
        if self.image is None or self.slot is not None:
            return
        size = self.image.size
        session, durable = self.session, self.facts.durable
        tier, capturer, drain = session.open()
        began = session.clock.monotonic()
        with needing_room(session, self.facts):
            # A memory-only save leaves room for the log of later deletes and uploads.
            (drain.start if durable else drain.queue.open)()
            self.slot = capturer.acquire(
                size,
                self.facts.scope(self.rank, session.place),
                retained=retained,
                spills=durable or self.facts.left_out or session.config.spill_dir not in (AUTO, None),
            )
        self.capture_s = session.clock.monotonic() - began
        self.spilled = tier.is_spilled(self.slot.path)
        try:
            if self.spilled:
                warn_spilled(session, size)
        except BaseException:
            self.give_back()
            raise

    def fill(self, *, hashed: bool = True) -> None:
        """Copies the state into its slot, if it has one; as :meth:`capture`."""
        if self.image is None or self.slot is None:
            return
        session, slot, self.slot = self.session, self.slot, None
        began = session.clock.monotonic()
        self.hashes = session.open().capturer.fill(self.image, slot, threads=self.threads, hashed=hashed)
        self.slot = slot
        self.capture_s += session.clock.monotonic() - began

    def fill_beside(self, overlapped: Overlapped) -> None:
        """Does :meth:`fill` on a background task; raises ``ChangedError`` if the state has changed."""
        # The training has the cores.
        self.threads = 1
        with overlapped.on_side_streams():
            self.fill(hashed=not overlapped.hashes_later)
        overlapped.check()
        overlapped.copied.set()

    # ------------------------------------------------------------------------------------- seal
    def seal(self, small: Mapping[str, bytes] | None = None) -> None:
        """Makes the part exist on this node, and queues its upload.

        Args:
            small: Its other files, by basename.

        Raises:
            MemoryFullError, SaveError: There is no room for its description; as :meth:`capture`.
        """
        with needing_room(self.session, self.facts):
            self._seal(small or {})

    def _seal(self, small: Mapping[str, bytes]) -> None:
        tier, _, drain = self.session.open()
        file: dict[str, Slot] = {self.facts.file_name(self.rank): self.slot} if self.slot is not None else {}
        try:
            tier.commit(self._describe(small), {**small, **file})
        except MemoryFullError:
            # The tier has given the slot up.
            self.slot = None
            raise
        except BaseException:
            self.give_back()
            raise
        self.slot = None
        if self.facts.durable:
            # The drain may have left while its queue was empty.
            drain.start()
            self._retain_durable()

    def _retain_durable(self) -> None:
        """Queues that retention is applied once the save is committed, by the rank that commits it.

        Only if there are policies, and if this run has claimed the dirpath.
        """
        session, facts = self.session, self.facts
        owner = session.claims.owner
        if self.rank != facts.coordinator or not session.config.retention or owner is None:
            return
        waiting = [each for each in session.open().drain.queue.requests() if each.action == "retain"]
        # Without a server, saves are given up, and no retention is done; the next request does all of it.
        if len(waiting) <= session.config.support.max_pending:
            session.submit("retain", RETENTION + owner, facts.save_id)

    def prepare_next(self) -> None:
        """Makes a slot for the next save in the background, if this one was in memory."""
        if self.image is not None and not self.spilled:
            self.session.open().capturer.prepare(self.image.size)

    def _describe(self, small: Mapping[str, bytes]) -> Part:
        files = [hashed(f"{self.facts.name}/{basename}", memoryview(data)) for basename, data in small.items()]
        if self.image is not None:
            if self.slot is not None and not self.hashes:
                self.hashes = self.image.hashes(self.slot.view, threads=self.threads)
            entry = FileEntry(self.facts.path(self.rank), self.image.size, self.image.chunk_size, self.hashes)
            files.insert(0, entry)
        config = self.session.config
        return self.facts.describe(
            self.rank, self.session.place, tuple(files), created=self.session.clock.wall(), namespace=config.namespace
        )

    def give_back(self) -> None:
        """Frees the part's slot."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self.session.open().tier.give_back(slot)

    # ----------------------------------------------------------------------------------- report
    def wait(self, is_hopeless: Callable[[], bool] = lambda: False) -> bool:
        """Waits until the drain's upload is on the durable tier; for ``is_hopeless`` see :meth:`DrainHandle.wait`.

        Returns:
            True if it is there; False if the drain makes no progress for ``pending_timeout_s``, or the job has to end.

        Raises:
            SaveError: The upload failed; or it makes no progress or was skipped, and ``on_save_error`` is ``raise``.
            DrainError: The upload is not done within ``wait_timeout_s``, or hopeless.
        """
        drain, config, facts = self.session.open().drain, self.session.config, self.facts
        timeout_s, moving_s = config.support.wait_timeout_s, config.support.pending_timeout_s
        if (left_out := why_left_out(self.session, facts)) is not None:
            raise self.not_durable(left_out, "it is not queued: save again once the durable tier has the earlier ones")
        if self.op_id is None:
            return True
        try:
            outcome = drain.wait(self.op_id, timeout_s, is_hopeless, moving_s=moving_s)
        except StandstillError as still:
            ends = drain.leave_by is not None
            if ends or config.on_save_error == "warn":
                text = "%s stays in node memory, queued for upload: %s" + ("" if ends else "; training continues")
                self.session.log.at_step(facts.step).warning(text, self.facts.label(self.rank), still.message)
                return False
            raise self.not_durable(still.message, still.hint) from still
        if outcome.state != "committed":
            raise self.not_durable(outcome.error)
        return True

    def not_durable(self, why: str, hint: str | None = None) -> SaveError:
        """Returns the error for a checkpoint that the durable tier does not get."""
        facts = self.facts
        return SaveError(
            f"{facts.name} is in memory, but not on the durable tier: {why}",
            operation="save",
            tier="durable",
            key=ids.join_url(self.session.dirpath, facts.name),
            step=facts.step,
            hint=hint,
        )

    def report(self, *, small: int = 0, waited: bool = False) -> SaveReport:
        """Counts and logs the save.

        Args:
            small: Bytes of its other files.
            waited: True if the upload has been waited for.
        """
        session, facts = self.session, self.facts
        report = self.make_report(small=small, waited=waited)
        session.counts["saved"] += 1
        if not facts.durable:
            # The next one without room is warned of again.
            session.warned.discard("skipped")
        session.note(
            "save",
            name=facts.name,
            step=facts.step,
            size_bytes=report.size,
            stall_s=round(report.stall_s, 6),
            capture_s=round(self.capture_s, 6),
            durable=facts.durable,
            queued=report.queued,
        )
        log = session.log.at_step(facts.step)
        # One part counts for the save; memory-only steps are too many.
        say = log.info if facts.durable and self.rank == facts.coordinator else log.debug
        say(report.line(session.dirpath, self.facts.label(self.rank)))
        return report

    def make_report(self, *, small: int = 0, waited: bool = False) -> SaveReport:
        """Returns the report to the caller, now that the call ends; see :meth:`report`, which may come later."""
        session, facts = self.session, self.facts
        size = (self.image.size if self.image is not None else 0) + small
        stall = session.clock.monotonic() - self.started if self.overlapped is None else self.overlapped.stall_s
        tiers = frozenset({"memory", "durable"} if facts.durable else {"memory"})
        queued = facts.durable and not waited
        report = SaveReport(
            *(facts.name, facts.step, facts.save_id, size, stall, tiers, queued, self.spilled, self.capture_s),
            *(self.overlapped is not None, facts.resumable),
        )
        if self.overlapped is None or self.overlapped.made is None:
            session.last_save = report
        return report
