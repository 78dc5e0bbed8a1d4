"""A save, carried out: plan, capture, commit, report. One way for full, local and sharded checkpoints.

A rank's planned file is *captured* into a slot of node memory, or of the spill if that has no room; *committed*, that
is hashed, described and renamed into place, from when on the part exists, and if it is durable its upload is queued;
and reported. If neither has room, a durable save fails, and a memory-only save is skipped.

Payloads differ in their facts, see :mod:`facts`; in the evidence by which memory drops earlier parts; and in the moment
of the commit: sharded parts wait until all ranks have captured theirs, see :mod:`coordinated`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tiered_checkpoint_io.engine.drain.operations import RETENTION
from tiered_checkpoint_io.engine.drain.status import SaveReport, StandstillError
from tiered_checkpoint_io.engine.ranks.run import LeftBehindError, Run, Where, current_rank, current_run
from tiered_checkpoint_io.engine.retention import Rules, complete_here, retain
from tiered_checkpoint_io.engine.save.facts import (
    FOUND_CHANGED,
    OF_PARTS,
    SaveFacts,
    admit,
    alone,
    has_missed,
    needing_room,
    position,
    say_eager,
    skip,
    warn_at_first_save,
    warn_spilled,
)
from tiered_checkpoint_io.engine.save.overlap import ChangedError, Overlap, Overlapped
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, DrainError, SaveError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import AUTO
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry, Part

_T = TypeVar("_T")


@dataclass(slots=True)
class PartSave:
    """A part during its save.

    Attributes:
        image: Its file, planned; None if the rank has none.
        threads: Number of threads that copy and hash.
        started: When the save began, by the monotonic clock; now by default.
        slot: Slot of the file, until the part exists.
        hashes: Hashes of its chunks; empty if they are still to be made.
        capture_s: Time of the copy, seconds.
        overlapped: The overlapped capture in progress, if any.
        is_sealed_later: True if the part is hashed and sealed in the background, after its capture.
        small: Makes its other files, by basename; None until they are known.
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
    is_sealed_later: bool = False
    small: Callable[[], Mapping[str, bytes]] | None = dict

    def __post_init__(self) -> None:
        self.started = self.started or self.session.clock.monotonic()

    @property
    def op_id(self) -> str | None:
        """The drain's operation that uploads it; None if none does."""
        if not self.facts.durable:
            return None
        return ids.part_op_id(self.facts.save_id, self.rank, commits=self.rank == self.facts.coordinator)

    # ---------------------------------------------------------------------------------- capture
    @property
    def rules(self) -> Rules:
        """Rules of retention for this save, as far as its facts tell."""
        return self.facts.rules(self.rank, self.session.place)

    def capture(self, held: Collection[StoredPart], rules: Rules) -> None:
        """Makes room for the state, and copies it; later changes to the tensors do not affect the checkpoint.

        Without room, a memory-only save raises MemoryFullError, and a durable one SaveError, as does a state that
        changed during an overlapped capture.
        """
        # This save adds one checkpoint; memory keeps at least two, because this save may fail.
        keep = max(1, self.session.config.memory_keep_last - 1)
        size = self.image.size if self.image is not None else 0
        retain(self.session.open().tier, held, replace(rules, keep=keep), size=size)
        self.reserve(rules)
        self.fill(hashed=not self.is_sealed_later)

    def reserve(self, rules: Rules) -> None:
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
                rules,
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
        overlapped = self.overlapped
        if overlapped is None:
            self._copy(hashed=hashed)
            return
        # The training has the cores.
        self.threads = 1
        with overlapped.on_side_streams():
            self._copy(hashed=not overlapped.hashes_later)
        overlapped.check()
        overlapped.copied.set()

    def _copy(self, *, hashed: bool) -> None:
        if self.image is None or self.slot is None:
            return
        session, slot, self.slot = self.session, self.slot, None
        began = session.clock.monotonic()
        self.hashes = session.open().capturer.fill(self.image, slot, threads=self.threads, hashed=hashed)
        self.slot = slot
        self.capture_s += session.clock.monotonic() - began

    # ------------------------------------------------------------------------------------- seal
    def seal(self) -> None:
        """Makes the part exist on this node, and queues its upload; raises as :meth:`capture`, for lack of room."""
        assert self.small is not None
        tier, _, drain = self.session.open()
        file: dict[str, Slot] = {self.facts.file_name(self.rank): self.slot} if self.slot is not None else {}
        with needing_room(self.session, self.facts):
            small = self.small()
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

    def complete(self) -> None:
        """Does :meth:`seal`, and all that follows once the part exists; a full save frees memory only now."""
        session, facts = self.session, self.facts
        self.seal()
        if facts.payload == "full":
            # Before the next save's slot is prepared: a part that goes may free that slot.
            held = session.open().tier.parts()
            retain(session.open().tier, held, replace(self.rules, keep=session.config.memory_keep_last))
        if self.image is not None and not self.spilled:
            session.open().capturer.prepare(self.image.size)
        session.background.saved(facts.name, durable=facts.durable)

    def _describe(self, small: Mapping[str, bytes]) -> Part:
        files = [FileEntry.of(f"{self.facts.name}/{basename}", data) for basename, data in small.items()]
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

        Returns False if the drain makes no progress for ``pending_timeout_s``, or the job has to end. Raises DrainError
        if the upload is hopeless, or not done within ``wait_timeout_s``; SaveError if it failed, or, with
        ``on_save_error: raise``, makes no progress or was skipped.
        """
        drain, config, facts = self.session.open().drain, self.session.config, self.facts
        timeout_s, moving_s = config.support.wait_timeout_s, config.support.pending_timeout_s
        if has_missed(self.session, facts):
            hint = "it is not queued: save again once the durable tier has the earlier ones"
            raise self.not_durable("too many saves wait for it", hint)
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

    def report(self, *, waited: bool = False) -> SaveReport:
        """Counts and logs the save, whose upload has been ``waited`` for."""
        session, facts = self.session, self.facts
        report = self.make_report(waited=waited)
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

    def make_report(self, *, waited: bool = False) -> SaveReport:
        """Returns the report to the caller, now that the call ends; see :meth:`report`, which may come later."""
        session, facts = self.session, self.facts
        # In the background, small files are made later.
        small = {} if self.is_sealed_later or self.small is None else self.small()
        size = (self.image.size if self.image is not None else 0) + sum(map(len, small.values()))
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


class Saver:
    """Base of the savers of one process: captures may ``overlap`` training after a save has returned; None if not."""

    def __init__(self, session: Session, why_eager: str) -> None:
        """Takes the tiers, and the reason that is logged for an eager save."""
        self.session = self._session = session
        self._why_eager = why_eager
        self.overlap: Overlap | None = None

    def may_overlap(self) -> bool:
        """Returns True if the next save may overlap training; if not, logs the reason once."""
        if self.overlap is None:
            say_eager(self._session, self._why_eager)
        return self.overlap is not None

    def stop_overlapping(self) -> None:
        """Has all later captures end before their saves return: a state that changed once will change again."""
        self.overlap, self._why_eager = None, FOUND_CHANGED


class FullSaver(Saver):
    """Saves full checkpoints: one rank has the whole state.

    The state is captured before a save returns; or, with :attr:`overlap`, on a background task during training.
    """

    def __init__(self, session: Session) -> None:
        """Takes the tiers."""
        super().__init__(session, "only a Trainer of Lightning's, while it fits, waits for it at optimizer steps")
        #: Errors of saves that were left to the background.
        self._errors: list[Exception] = []
        self._has_looked = False

    def save(self, state: Any, wanted: SaveFacts, *, wait: bool) -> SaveReport | None:
        """Saves a state, of the facts that its caller knows: see :meth:`Checkpointer.save`."""
        name, durable = wanted.name, wanted.durable
        session, started = self._session, self._session.clock.monotonic()
        with session.turn.taken(name):
            try:
                self.show()
            except DrainError as error:
                # The background work has exceeded its bound: this save can't wait longer.
                self._failed(name, position(state, name)[0], error)
                return None
            # A save whose rest is left to the background looks there, if it comes so far: see :meth:`_complete`.
            looks, self._has_looked = self.overlap is None or not self._has_looked, False
            session.surface(looks=looks)
            session.claims.check()
            if durable and current_rank() == 0:
                session.claims.claim()
        facts: SaveFacts | None = None
        try:
            with session.turn.taken(name):
                # Another thread may have had the turn meanwhile.
                session.background.wait()
                facts = admit(session, alone(session, wanted, state))
                part = PartSave(session, facts, facts.coordinator, None, started=started)
                is_eager = (wait and facts.durable) or not self.may_overlap()
                part.image = plan(state)
                part.reserve(part.rules)
                if not is_eager and self._begin(part):
                    return self._leave(part)
                part.fill()
                self._complete(part)
            waited = wait and part.wait()
        except ConfigError:
            raise
        except Exception as error:
            self._failed(name, position(state, name)[0], error, facts)
            return None
        with session.turn.taken(name):
            return part.report(waited=waited)

    def _complete(self, part: PartSave) -> None:
        """Seals the captured part."""
        session = self._session
        if self.overlap is not None:
            # Before this save has an outcome of its own, which is logged by the caller that waits for it.
            self._has_looked = True
            session.look()
        part.complete()
        warn_at_first_save(session, part.facts.name, part.image)

    def _failed(self, name: str, step: int, error: Exception, facts: SaveFacts | None = None) -> None:
        if isinstance(error, MemoryFullError) and facts is not None:
            skip(self._session, facts, error)
        else:
            self._session.failed(name, step, error)

    # ------------------------------------------------------------------------------- overlapped
    def _begin(self, part: PartSave) -> bool:
        """Begins an overlapped capture of a part that has its slot; returns False if the capture is to be eager."""
        try:
            assert part.image is not None
            assert self.overlap is not None
            begun = self.overlap.begin(part.image) if part.image.planned else None
        except BaseException:
            part.give_back()
            raise
        if begun is not None:
            part.image, part.overlapped = begun
        return begun is not None

    def _leave(self, part: PartSave) -> SaveReport:
        overlapped, session = part.overlapped, self._session
        assert overlapped is not None
        try:
            overlapped.stall_s = session.clock.monotonic() - part.started
            overlapped.made = session.last_save = report = part.make_report()
            session.background.run(part.facts.name, lambda: self._finish(part, overlapped))
        except BaseException:
            overlapped.copied.set()
            part.give_back()
            raise
        return report

    def _finish(self, part: PartSave, overlapped: Overlapped) -> None:
        """Captures the rest and seals it, in the background; a caller that needs either of them waits for it."""
        facts = part.facts
        try:
            overlapped.let_caller_return()
            part.fill()
            self._complete(part)
            part.report()
        except Exception as error:
            if facts.durable:
                self._session.background.lost.add(facts.name)
            if isinstance(error, ChangedError):
                self.stop_overlapping()
            try:
                try:
                    self._failed(facts.name, facts.step, error, facts)
                finally:
                    part.give_back()
            except Exception as shown:
                # A caller whose wait for it failed has raised.
                self._errors += [] if overlapped.is_late else [shown]
        finally:
            # The copies may be as large as a third of the state, and the next save makes its own.
            overlapped.copies = {}
            overlapped.copied.set()

    def show(self) -> None:
        """Waits for all background work; raises its failure if ``on_save_error`` is ``raise``; DrainError if late."""
        background = self._session.background
        background.wait()
        errors, self._errors = self._errors, []
        for error in errors:
            raise error
        background.show()


@dataclass(frozen=True, slots=True)
class LocalSaver:
    """Saves this rank's shard of a state on its node, without asking any other rank.

    ``ranks.run`` explains how the ranks' save ids agree. On the durable tier the checkpoint exists once the parts of
    all shards are there. Without an answer of the other ranks, a save only warns.

    ``repeat`` is from :meth:`Run.count_save`, which is called first, also on ranks that do not save. With ``wait``, a
    save returns, on all ranks, only when the checkpoint is committed there; see :meth:`PartSave.wait`.
    """

    session: Session
    shard: int
    wanted: SaveFacts
    repeat: int
    wait: bool
    threads: int | None
    run: Run = field(default_factory=current_run)

    def save(self, surface: Callable[[], None], planned: Callable[[], Image]) -> tuple[SaveReport, str | None] | None:
        """Captures the shard, and queues its upload.

        ``surface`` raises failures of earlier saves, which stop this one, and ``planned`` plans the state's file: both
        are called here, so that the other ranks learn of a failure. They then remove nothing for this save.

        Returns:
            The report, and the drain's operation that uploads the part, if any. None if a memory-only save was skipped.

        Raises:
            SaveError: Neither memory nor the spill has room for a durable save; or, on all ranks that wait, the save
                did not reach the durable tier.
            ConfigError: The run's id could not be learnt; or another live run writes to the same dirpath.
        """
        session, started = self.session, self.session.clock.monotonic()
        held, failure = self._look(surface)
        try:
            facts = _answered(session, lambda: self._facts(held))
        except ConfigError as error:
            raise (failure or error) from None
        try:
            if failure is not None:
                raise failure
            facts = admit(session, facts, held)
            if self.wanted.durable and not facts.durable:
                self._report_missing(facts, "durable")
            part = PartSave(session, facts, self.shard, planned(), self.threads, started)
            rules = part.rules
            ours = {each.save_id for each in held if rules.covers(each) and rules.of_this_run(each.save_id)}
            said = "retention skipped: it is not known whether the newer checkpoint is complete: %s"
            if (lacking := self._tried(lambda: self.run.lacking(sorted(ours)), said)) is None:
                rules = replace(rules, completed=(), retained={each.save_id for each in held})
            else:
                rules = complete_here(held, rules, lacking)
            part.capture(held, rules)
            part.complete()
        except Exception as error:
            self._report_missing(facts, "memory")
            if isinstance(error, MemoryFullError):
                skip(session, facts, error)
                return None
            if self.wanted.durable:
                self._report_missing(facts, "durable")
            raise
        waited = self.wait and self._wait(part)
        return part.report(waited=waited), part.op_id

    def _look(self, surface: Callable[[], None]) -> tuple[Collection[StoredPart], Exception | None]:
        """Returns the parts in this node's memory, and an error, to be raised once the other ranks know of it."""
        session, held = self.session, list[StoredPart]()
        try:
            # First: the id of a run follows from the saves that are here.
            held = session.open().tier.parts()
            surface()
            session.claims.check()
            if self.shard == 0:
                say_eager(session, OF_PARTS)
                if self.wanted.durable:
                    session.claims.claim()
        except Exception as error:
            return held, error
        return held, None

    def _facts(self, held: Collection[StoredPart]) -> SaveFacts:
        """Returns the facts, with the save id that each rank derives; ConfigError if the run's id can't be asked."""
        session, wanted, ids_of = self.session, self.wanted, self.session.save_ids
        seen = [*(stored.save_id for stored in held), ids_of.newest]
        series = session.config.namespace, wanted.series
        save_id = self.run.save_id(*series, wanted.step, self.repeat, lambda: ids_of.new_run(seen))
        ids_of.follow(save_id)
        return replace(wanted, save_id=save_id)

    def _tried(self, ask: Callable[[], _T], warning: str, *arguments: object) -> _T | None:
        """Returns the result of ``ask``; None, with a warning, if the store does not answer."""
        try:
            return ask()
        except ConfigError as error:
            # The save continues, or has failed already for a more important reason.
            self.session.log.at_step(self.wanted.step).warning(warning, *arguments, error)
            return None

    def _report_missing(self, facts: SaveFacts, where: Where) -> None:
        said = "could not tell the other ranks that the part of shard %d is missing: %s"
        self._tried(lambda: self.run.report_missing(facts.save_id, where), said, self.shard)

    def _wait(self, part: PartSave) -> bool:
        """Waits as :meth:`PartSave.wait`, for the whole checkpoint: shard 0 reports the commit to the other ranks."""
        if part.facts.world_size == 1 or not part.facts.durable:
            return part.wait()
        if self.shard != part.facts.coordinator:
            return part.wait() and self._wait_for_commit(part)
        end, asks = "", True

        def is_given_up() -> bool:
            nonlocal asks
            said = "could not ask whether a save was given up: %s"
            missing = self._tried(lambda: self.run.is_missing(part.facts.save_id, "durable"), said) if asks else False
            asks = missing is not None
            return bool(missing)

        try:
            end = "committed" if part.wait(is_given_up) else "queued"
        except BaseException as error:
            end = str(error) or type(error).__name__
            raise
        finally:
            said = "could not tell the other ranks what became of the save: %s"
            self._tried(lambda: self.run.report_end(part.facts.save_id, end), said)
        return end == "committed"

    def _wait_for_commit(self, part: PartSave) -> bool:
        session, facts, clock = self.session, part.facts, self.session.clock
        began, timeout_s, end = clock.monotonic(), session.config.support.wait_timeout_s, None
        while end is None:
            waited_s = clock.monotonic() - began
            if waited_s >= timeout_s:
                raise part.not_durable(f"shard 0 has not reported its commit within {timeout_s} s")
            clock.sleep(clock.timing.pause_s(clock.timing.local_poll_s, waited_s))
            try:
                end = _answered(session, lambda: self.run.end_of(facts.save_id))
            except ConfigError as error:
                if session.config.on_save_error == "raise":
                    raise part.not_durable(str(error)) from error
                text = "it is not known whether %s is committed: %s; training continues"
                session.log.at_step(facts.step).warning(text, facts.name, error)
                return False
        if end not in ("committed", "queued"):
            raise part.not_durable(end)
        return end == "committed"


def _answered(session: Session, ask: Callable[[], _T]) -> _T:
    """Returns the result of ``ask``; if the store of torch.distributed fails, asks again for ``pending_timeout_s``.

    Raises:
        ConfigError: The store has not answered for so long; at once if this rank was left behind.
    """
    clock, began, is_said = session.clock, session.clock.monotonic(), False
    while True:
        try:
            return ask()
        except LeftBehindError:
            raise
        except ConfigError as error:
            if clock.monotonic() - began >= session.config.support.pending_timeout_s or session.is_preempted:
                raise
            if not is_said:
                session.log.warning("a save waits for the store of torch.distributed: %s", error)
            is_said = True
        clock.sleep(clock.timing.local_poll_s)
