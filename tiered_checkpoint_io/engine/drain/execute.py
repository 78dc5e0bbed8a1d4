"""One operation of the drain, carried out: sends a part, gathers parts of other nodes, commits, deletes.

One that fails is tried again later, and a save that waits for parts of other nodes is looked at again, more and more
rarely; neither holds up later saves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.log import note
from tiered_checkpoint_io.engine.drain.operations import (
    DAMAGED_IN_MEMORY,
    NAMING,
    RETENTION,
    SAVES,
    TIDYING,
    Outcome,
    OutcomeState,
    Request,
    superseded,
)
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.status import Reporter
from tiered_checkpoint_io.engine.drain.stores import Stores
from tiered_checkpoint_io.engine.drain.unfinished import REFRESHES, Begun, Unfinished
from tiered_checkpoint_io.engine.durable import commit, copies, retention, sweep
from tiered_checkpoint_io.engine.durable.files import written
from tiered_checkpoint_io.engine.durable.lease import holder_of
from tiered_checkpoint_io.engine.durable.manifests import current
from tiered_checkpoint_io.engine.durable.sweep import Survey
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, of_step, rate
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart, reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.retention import policies_from
from tiered_checkpoint_io.stores import Store
from tiered_checkpoint_io.stores.base import UploadJournal


class _Stopped(Exception):  # noqa: N818 - not an error: ends an operation that continues later, or in another process
    pass


@dataclass
class Executor:
    """Carries out one operation after the other, and remembers the unfinished ones.

    Attributes:
        begun: Unfinished operations.
        refused: Durable tiers that do not copy objects, and for which this was logged.
        surveys: Knowledge of the sweep and of retention, by durable tier.
    """

    tier: MemoryTier
    queue: Queue
    stores: Stores
    report: Reporter
    log: Logger
    stop: threading.Event
    clock: Clock
    begun: Unfinished = field(default_factory=Unfinished)
    refused: set[Place] = field(default_factory=set)
    surveys: dict[Place, Survey] = field(default_factory=dict)

    def execute(self, operation: Request, operations: list[Request]) -> None:
        """Does the next possible step of an operation in the queue, and notes its outcome."""
        begun, stored = self.begun.get(operation.op_id), operation.stored
        started = self.clock.monotonic() if begun is None or begun.began is None else begun.began
        fate: commit.Fate | Literal["waits"] = "committed"
        state: OutcomeState = "committed"
        said = ""
        try:
            if stored is not None:
                fate = self._save(stored)
            elif operation.action == "cancel":
                self._cancel(operation, operations)
            else:
                store = self.stores.get(operation.place)
                if operation.action == "copy":
                    self._copy(operation, store, self.queue.journal(operation.op_id))
                elif operation.action == "alias":
                    copies.put_alias(store, operation.name, operation.target, before=operation.op_id)
                elif operation.action == "retain":
                    state, said = self._retain(operation, operations, store)
                elif self._is_due(operation, store):
                    sweep.delete(store, operation.name, before=operation.op_id, clock=self.clock)
        except _Stopped:
            return
        except Exception as error:
            # Any error is this operation's own: the drain has others to carry out.
            self._failed(operation, error, self.clock.monotonic() - started)
            return
        if fate == "waits":
            return
        if fate == "replaced":
            self._give_up(operation, "a later save has taken its name", answers=True)
            return
        if said:
            self.log.warning("retention%s: %s", " skipped" if state == "skipped" else "", said)
        if state == "skipped":
            self._finish(operation, state, said)
            return
        if begun is not None and begun.permanent:
            self.begun.allow(self.clock.monotonic())
        seconds, size = self.clock.monotonic() - started, self.begun.get(operation.op_id, Begun()).size
        self._finish(operation, state, said, seconds=seconds)
        if stored is not None:
            part = stored.part
            # Before it leaves the queue: else a caller that waits for the queue would find only failed saves there.
            for old in superseded(operations, self.begun.lost(part), operation):
                self._give_up(old, f"superseded by {part.name}", answers=True)
            # After the outcome: a drain that dies in between finds it committed, and reports it again.
            self._mark_drained(stored)
            what = "is durable" if part.commits else f"has its part of rank {part.rank} on the durable tier"
            what += f": {rate(size or part.content.size, seconds)}"
            self.log.info("%s%s %s", of_step(part.content.step), part.name, what)
        if not any(each.failures for each in self.begun.values()):
            self.report.now.last_error = ""
        if stored is None or stored.part.commits:
            # One drain looks for the remains of all nodes' drains: the coordinator's, which has most other requests.
            self.stores.abort_abandoned(operation.place)

    def _save(self, stored: StoredPart) -> commit.Fate | Literal["waits"]:
        """Does the next possible step for a part in memory: sends it, waits for other nodes' parts, commits."""
        part, rows = stored.part, None
        is_alone, timeout_s, clock = part.content.parts == 1, self.stores.config.support.wait_timeout_s, self.clock
        store, journal = self.stores.get(part.place), self.queue.journal(stored.op_id)
        with self.report.uploading(part.name, part.content.size), reading(stored) as files:
            if not is_alone:
                with contextlib.nullcontext() if commit.is_sent(journal) else self.begun.sending(stored.op_id, clock):
                    fate = commit.put_part(store, part, files, journal=journal, progress=self._progress, clock=clock)
                if fate == "sent" and not part.commits:
                    self.begun.alive.sent(part, clock)
                if fate == "replaced" or not part.commits:
                    return fate
                if fate == "sent" and (rows := self.begun.gather(store, part, timeout_s, clock)) is None:
                    return "waits"
            fate = commit.commit(store, part, files, rows, journal=journal, progress=self._progress, clock=clock)
        if fate != "replaced":
            self._sweep(store, part)
        return fate

    def _sweep(self, store: Store, committed: Part) -> None:
        """Removes saves that no manifest names, now and then after a commit; an error does not undo the commit."""
        survey, now, age_s = self._survey(committed.place), self.clock.monotonic(), self._age_s()
        if now < survey.due:
            return
        survey.due = now + age_s / REFRESHES
        live = {ids.save_id_of_op(each.op_id) for each in self.queue.look(self.tier) if each.action in SAVES}
        try:
            stored = written(store, ids.manifest_key(committed.name))
            gone = sweep.sweep(store, survey, before=stored - age_s, live=live - {committed.save_id}, clock=self.clock)
        except TieredCheckpointError as error:
            # A manifest that can't be read stays so from save to save.
            if str(error) != survey.told:
                self.log.warning("could not remove all that is left of incomplete saves: %s", error)
            survey.told = str(error)
            return
        for save_id, name in gone:
            self.log.warning("save %s of %s never became complete, or was deleted: removed its objects", save_id, name)

    def _age_s(self) -> float:
        return float(self.stores.config.support.sweep_age_s)

    def keep_alive(self) -> None:
        """Refreshes, now and then, the live saves of several parts of which this drain has one."""
        self.begun.alive.refresh(self.stores.get, self._age_s, self.clock)

    def _survey(self, place: Place) -> Survey:
        return self.surveys.setdefault(place, Survey())

    def _copy(self, operation: Request, store: Store, journal: UploadJournal) -> None:
        """Makes a name a copy of another; logs once for each durable tier why the tier can't copy."""

        @contextlib.contextmanager
        def in_memory(save_id: str) -> Iterator[memoryview | None]:
            held = [each for each in self.tier.parts() if each.save_id == save_id and not each.is_replica]
            with contextlib.ExitStack() as stack:
                view: memoryview | None = None
                # Retention may take it away meanwhile.
                with contextlib.suppress(CheckpointNotFoundError):
                    for stored in held[:1]:
                        (view,) = stack.enter_context(reading(stored)).values()
                        stack.enter_context(self.report.uploading(operation.name, stored.part.content.size))
                yield view

        refused = copies.put_copy(
            store,
            operation.name,
            operation.target,
            save_id=operation.op_id,
            dirpath=operation.dirpath,
            in_memory=in_memory,
            journal=journal,
            progress=self._progress,
            clock=self.clock,
        )
        if refused is not None and operation.place not in self.refused:
            self.refused.add(operation.place)
            self.log.warning(
                "the durable tier can't copy objects, so %s is uploaded from node memory, or becomes an alias if it is"
                " not there any more; save_last='link' always makes an alias: %s",
                operation.name,
                refused,
            )

    def _is_due(self, delete: Request, store: Store) -> bool:
        """Returns True if the save that a delete follows is there; raises if a checkpoint stays as it is not."""
        followed = self.queue.outcome(delete.target) if delete.target else None
        if not delete.target or (followed is not None and followed.state == "committed"):
            return True
        if current(store, delete.name) is None:
            return False
        text = f"{delete.name} stays, as the save that its delete follows did not reach the durable tier;"
        text += " `tiered-ckpt prune` finds what is too many"
        raise CheckpointNotFoundError(text, operation="drain", tier="durable", key=delete.name)

    def _retain(self, operation: Request, operations: list[Request], store: Store) -> tuple[OutcomeState, str]:
        """Applies the policies; returns the outcome, and the reason why it was not done, or the server's refusals."""
        if operation.place != self.stores.place:
            return "skipped", f"{operation.dirpath} is another dirpath than that of the run which is here now"
        policies = policies_from(self.stores.config.retention)
        survey = self._survey(operation.place)
        other = holder_of(store)
        if other is not None and other.owner != operation.name.removeprefix(RETENTION):
            text = f"{other.who} holds the lease of {operation.dirpath}, and removes what its own policies do not keep"
            return "skipped", text
        queued = [each for each in operations if each.place == operation.place and each.action in NAMING]
        needed = {name for each in queued for name in (each.name, each.target)}
        for each in retention.removed(store, policies, survey, needed=needed, clock=self.clock):
            if each.is_gone:
                self.log.info("retention removed %s: no policy keeps it", each.checkpoint.name)
            # There may be thousands, if the policies are new.
            if self.stop.is_set() or self._has_save():
                self.begun.setdefault(operation.op_id, Begun(is_cleanup=True))
                raise _Stopped
        refused, survey.refused = survey.refused, []
        return "committed", retention.refused_text(refused) if refused else ""

    def _has_save(self) -> bool:
        """Returns True if a queued save is due now."""
        now = self.clock.monotonic()
        saves = [each.op_id for each in self.queue.look(self.tier) if each.action in SAVES]
        return any(self.begun.get(op_id, Begun()).due <= now for op_id in saves)

    def _progress(self, count: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        self.report.add(count)
        self.keep_alive()

    def _cancel(self, operation: Request, operations: list[Request]) -> None:
        save_id = ids.save_id_of_op(operation.target)
        cancelled = [each for each in operations if each.action in SAVES and ids.save_id_of_op(each.op_id) == save_id]
        if any(self._has_come(each) for each in cancelled):
            self.log.info("%s is not given up: its last parts have come", cancelled[0].name)
            return
        for other in cancelled:
            self._give_up(other, "cancelled to keep the queue bounded")

    def _has_come(self, operation: Request) -> bool:
        """Returns True if all awaited parts of a save have arrived; then the save is due now."""
        stored, begun = operation.stored, self.begun.get(operation.op_id)
        if stored is None or not stored.part.commits or stored.part.content.parts == 1:
            return False
        if begun is None and commit.is_sent(self.queue.journal(operation.op_id)):
            # An earlier drain sent it.
            begun = self.begun.waits(stored.part, self.clock)
        # A save that failed after it was spared is not spared again: else the queue would grow.
        if begun is None or begun.arrivals is None or begun.failures > begun.failures_when_spared:
            return False
        try:
            begun.arrivals.look(self.stores.get(operation.place))
        except Exception as error:
            # The queue stays bounded after any error.
            self.log.warning("could not look for the parts of %s: %s", operation.name, error)
            return False
        if begun.arrivals.missing:
            return False
        begun.due, begun.failures_when_spared = self.clock.monotonic(), min(begun.failures_when_spared, begun.failures)
        return True

    def _give_up(self, operation: Request, reason: str, *, answers: bool = False) -> None:
        """Ends an operation that will not be carried out; with ``answers``, the durable tier answered just now."""
        stored, journal = operation.stored, self.queue.journal(operation.op_id)
        assert stored is not None, operation
        if journal.read() is not None and (answers or not self.begun.get(operation.op_id, Begun()).failures):
            # An upload that cannot be abandoned now is found by the next look for stale uploads.
            with contextlib.suppress(TieredCheckpointError):
                commit.abandon(self.stores.get(operation.place), stored.part, journal)
        self.log.warning("%s will not be durable: %s", operation.name, reason)
        self._finish(operation, "skipped", reason)
        self._mark_drained(stored)

    # -------------------------------------------------------------------------------- outcomes
    def _failed(self, operation: Request, error: Exception, seconds: float) -> None:
        self.report.now.last_error = str(error)
        if operation.stored is not None and _type_of(error) == DAMAGED_IN_MEMORY:
            self._finish(operation, "failed", error)
            where = self.tier.quarantine(operation.stored.folder, str(error))
            self.queue.ring()
            self.log.error("%s is corrupt in memory and was moved to %s: %s", operation.name, where, error)
        elif isinstance(error, CheckpointNotFoundError) or (isinstance(error, ConfigError) and error.reason == "held"):
            # A save that was removed from memory, or an alias whose target was given up: then the old alias still names
            # a good checkpoint. Or a delete of a checkpoint that another program uses.
            self.log.warning("%s", error)
            self._finish(operation, "skipped", error)
        else:
            begun = self.begun.setdefault(operation.op_id, Begun(is_cleanup=operation.action in TIDYING))
            last = max((each.due for each in self.begun.refused), default=0.0)
            begun.failed(error, self.clock, last)
            if begun.failures == 1:
                known = isinstance(error, TieredCheckpointError | OSError)
                text = "%s of %s failed, to be tried again: %s"
                self.log.error(text, operation.action, operation.name, error, exc_info=None if known else error)
            self._finish(operation, "failed", error, seconds=seconds, final=False)

    def _finish(
        self,
        operation: Request,
        state: OutcomeState,
        error: Exception | str = "",
        *,
        seconds: float = 0.0,
        final: bool = True,
    ) -> None:
        """Notes how an operation ended; one that is not tried again leaves the queue."""
        self.report.counts["uploaded" if operation.action == "part" and state == "committed" else state] += 1
        content = operation.stored.part.content if operation.stored is not None else None
        begun = self.begun.get(operation.op_id, Begun())
        if final:
            self.begun.pop(operation.op_id, None)
        sent_s, mine = (seconds if begun.began is None else begun.sent_s), 0
        if state == "committed":  # The rate of an earlier drain's uploads is not known.
            mine = content.size if content is not None else 0
            self.report.succeeded(mine if sent_s else 0, sent_s)
        outcome = Outcome(
            operation.op_id,
            operation.action,
            operation.name,
            content.step if content is not None else -1,
            state,
            str(error),
            _type_of(error) if isinstance(error, Exception) else "",
            begun.size or mine if state == "committed" else 0,
            seconds,
            self.clock.wall(),
            begun.failures + (final and state != "skipped"),
            operation.dirpath,
            operation.server,
        )
        note(
            self.tier.root,
            "upload",
            clock=self.clock,
            action=outcome.action,
            name=outcome.name,
            step=outcome.step,
            state=state,
            size_bytes=mine,
            seconds=round(sent_s, 3),
            created=content.created if content is not None else 0.0,
            error=outcome.error,
        )
        try:
            self.queue.finish(outcome, final=final)
        except MemoryFullError as full:
            # No log could be made: memory was full already when this drain started. Further work frees memory.
            self.log.error("could not note the outcome of %s: %s", operation.name, full)

    def _mark_drained(self, stored: StoredPart) -> None:
        """Notes in memory that the durable tier needs nothing more of a part."""
        try:
            self.tier.mark_drained(stored)
        except OSError as error:
            self.log.error("could not mark %s as uploaded, so node memory keeps it: %s", stored.part.name, error)
            self.begun.setdefault(stored.op_id, Begun()).failed(error, self.clock)
        self.queue.ring()


def _type_of(error: Exception) -> str:
    is_damaged = isinstance(error, CorruptCheckpointError) and error.tier == "memory"
    return DAMAGED_IN_MEMORY if is_damaged else getattr(error, "reason", None) or type(error).__name__
