"""The drain: moves parts from node memory to the durable tier, commits there, and deletes.

One drain a node and namespace, held by a file lock; a process of its own, a thread, or a sidecar. A drain outlives the
trainer, continues the work of a dead drain, and imports neither torch nor Lightning. An operation that fails is tried
again later, and a save that waits for parts of other nodes is looked at again, more and more rarely; neither holds up
later saves.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tiered_checkpoint_io.clock import SYSTEM, Clock
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
    next_operation,
    superseded,
)
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.serving import Server
from tiered_checkpoint_io.engine.drain.status import Reporter, shorten_log
from tiered_checkpoint_io.engine.drain.stores import Stores
from tiered_checkpoint_io.engine.drain.unfinished import Begun, Unfinished
from tiered_checkpoint_io.engine.durable import commit, copies, retention, sweep
from tiered_checkpoint_io.engine.durable.files import written
from tiered_checkpoint_io.engine.durable.lease import holder_of
from tiered_checkpoint_io.engine.durable.manifests import current
from tiered_checkpoint_io.engine.replication.replicas import Replicas
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, of_step, rate
from tiered_checkpoint_io.memory.node import MemoryFullError, is_lost, is_scarcity, make_folders, release, try_lock
from tiered_checkpoint_io.memory.parts import StoredPart, reading
from tiered_checkpoint_io.memory.tier import FOLDERS, MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.retention import policies_from
from tiered_checkpoint_io.stores import Store, open_store, place_of
from tiered_checkpoint_io.stores.base import UploadJournal

LOCK_FILE = "drain.lock"
TRAINERS_FILE = "trainers.lock"
#: Number of refreshes of a live save within the age at which a sweep takes it for dead.
_REFRESHES = 4


class _Stopped(Exception):  # noqa: N818 - not an error: ends an operation that continues later, or in another process
    pass


def _open_store(config: TieredCheckpointConfig, dirpath: str | None, clock: Clock) -> Store:
    return open_store(config, dirpath, clock=clock)


class Drain:
    """The drain of one memory tier root."""

    def __init__(
        self,
        root: Path,
        *,
        logger: Logger | None = None,
        stop: threading.Event | None = None,
        stay: bool = False,
        for_trainer: bool = False,
        open_store: Callable[[TieredCheckpointConfig, str | None, Clock], Store] = _open_store,
        clock: Clock = SYSTEM,
    ) -> None:
        """Takes a root whose ``drain.json`` says how to reach the durable tier.

        ``stop`` ends the drain after the part in flight, ``stay`` has it wait for further work without a trainer. The
        drain of a trainer leaves when a later trainer asks it to.
        """
        self._root = root
        self._clock = clock
        self._tier = MemoryTier(root, clock=clock)
        self._queue = Queue(root, clock=clock)
        self._log: Logger = logger or logging.getLogger(__name__)
        self._stop = stop or threading.Event()
        self._stay = stay
        self._for_trainer = for_trainer
        self._token = clock.token(16) if for_trainer else ""
        self._stores = Stores(root, open_store, self._log, clock)
        self._report = Reporter(self._queue, self._stores, clock)
        self._begun = Unfinished()
        #: Durable tiers that do not copy objects, and for which this was logged.
        self._refused: set[Place] = set()
        #: Knowledge of the sweep and of retention.
        self._surveys: dict[Place, sweep.Survey] = {}
        self._refresh_at, self._refreshing = -math.inf, threading.Lock()
        #: Parts of several that were sent, and since when, by their saves: memory may drop them before the commit.
        self._sent: dict[str, tuple[Part, float]] = {}
        self._replicas = Replicas(root, self._tier, self._log, clock)
        serves = stay or for_trainer
        self._server = Server(root, self._tier, self._log, clock, self._replicas) if serves else None
        self._lock: int | None = None
        self._trainers: int | None = None

    def run(self, *, once: bool = False) -> bool:
        """Works until the queue is empty and no trainer lives; with ``once``, as long as anything can be done now.

        Returns False, without any work, if another drain holds the lock.
        """
        # A process that asks whether a drain runs holds its lock for a moment.
        lock = try_lock(self._root / LOCK_FILE, patience_s=self._clock.timing.drain_lock_s, clock=self._clock)
        if lock is None:
            return False
        self._lock = lock
        try:
            with self._report.beating(self._serve):
                self._loop(once=once)
        finally:
            if self._server is not None:
                self._server.close()
            self._replicas.close()
            self._stores.close()
            release(lock)
            if self._trainers is not None:
                # Only now: a trainer that came meanwhile has waited for this, and finds no drain.
                release(self._trainers)
                self._trainers = None
        return True

    def follows(self) -> bool:
        """Returns whether to wait for the drain that holds the lock: a trainer has asked it to leave."""
        return self._for_trainer and self._queue.is_asked_to_leave(self._queue.announced())

    @property
    def is_replicating(self) -> bool:
        """See :attr:`Replicas.is_busy`."""
        return self._replicas.is_busy

    @property
    def trouble(self) -> str:
        """See :class:`DrainProgress`."""
        return self._report.now.trouble

    # -------------------------------------------------------------------------------- the loop
    def _loop(self, *, once: bool) -> None:
        clock, troubled_at, is_new = self._clock, None, True
        self._report.last_success = clock.monotonic()
        # If this memory was removed, another drain may work on a new one in its place.
        while not (self._stop.is_set() or (self._lock is not None and is_lost(self._lock))):
            try:
                if is_new:
                    self._prepare()
                    is_new = False
                if self._turn(once=once):
                    return
                troubled_at, self._report.now.trouble = None, ""
            except OSError as error:
                # For example, no descriptor is left: a later look may find some. All work that was begun is noted.
                if once or not is_scarcity(error):
                    raise
                if troubled_at is None:
                    self._log.error("cannot look at the queue, trying again: %s", error)
                    troubled_at = clock.monotonic()
                self._report.now.last_error = str(error)
                if clock.monotonic() - troubled_at > clock.timing.drain_trouble_s:
                    self._report.now.trouble = str(error)
                clock.wait(self._stop, clock.timing.drain_rest_s)

    def _prepare(self) -> None:
        """Makes folders and log if they are missing, and says that this drain begins."""
        # A power loss may have left only some folders of a root on a disk.
        make_folders(self._root, FOLDERS, self._log.warning)
        try:
            self._queue.open()
            self._queue.announce(self._token)
        except MemoryFullError as full:
            # Work without a log frees memory.
            self._log.error("outcomes are not noted: %s", full)
        with contextlib.suppress(TieredCheckpointError, OSError):
            # Its imports take seconds on a busy node. The first operation reports an error again.
            self._stores.get(place_of(self._stores.config))
        for each in self._tier.parts():
            part = each.part
            if part.durable and each.drained and part.content.parts > 1 and not (part.commits or each.is_replica):
                # An earlier drain has sent it.
                self._sent[part.save_id] = part, self._clock.monotonic()

    def _serve(self) -> None:
        """Serves this node's memory to other nodes, and stops, if a trainer asks for that; never raises."""
        if self._server is not None:
            self._server.look()
            self._replicas.look()
        with contextlib.suppress(OSError):
            if not self._stop.is_set() and self._queue.is_asked_to_leave(self._token):
                self._log.info("leaving to the drain of a later trainer")
                # Also during a request: its server may be silent.
                self._stop.set()

    def _turn(self, *, once: bool) -> bool:
        """Does the next work; returns True if there is no reason to stay."""
        version = self._queue.version()
        self._serve()
        if self._stop.is_set():
            return True
        with contextlib.suppress(OSError, ConfigError):
            self._tier.use_spill(self._stores.config.spill_dir)
            self._tier.place, self._replicas.keep_last = self._stores.place, self._stores.config.memory_keep_last
        # Operations of the trainer that lives, or was the last, go before those for another durable tier.
        operations = sorted(self._queue.look(self._tier), key=lambda each: each.place != self._tier.place)
        self._report.now.pending = len(operations)
        self._keep_alive()
        waiting = self._begun.waiting({operation.op_id for operation in operations}, self._clock.monotonic())
        operation = next_operation(operations, waiting.keys() | self._begun.later)
        operation = operation or next_operation(operations, waiting)
        is_idle = operation is None
        if is_idle if once else not self._stay and self._may_leave(is_idle=is_idle):
            return True
        if operation is not None:
            self._execute(operation, operations)
            self._report.write()
            shorten_log(self._root)
        else:
            self._rest(version, min([*waiting.values(), self._clock.monotonic() + self._clock.timing.full_look_s]))
        return False

    def _rest(self, version: bytes, until: float) -> None:
        """Waits for a change of the log, or until something is due; looks by itself now and then all the same."""
        clock = self._clock
        while not self._stop.is_set() and clock.monotonic() < until and self._queue.version() == version:
            clock.wait(self._stop, clock.timing.drain_rest_s)

    def _may_leave(self, *, is_idle: bool) -> bool:
        """Returns True if this drain is to leave; then no trainer can come until it has left."""
        self._trainers = try_lock(self._root / TRAINERS_FILE)
        if self._trainers is None:
            self._report.last_success = self._clock.monotonic()
            return False
        is_over = False
        try:
            # Under the lock: no trainer can add to the queue now.
            is_over = self._is_over(is_idle=is_idle)
        finally:
            if not is_over:
                release(self._trainers)
                self._trainers = None
        return is_over

    def _is_over(self, *, is_idle: bool) -> bool:
        now = self._clock.monotonic()
        # Failing operations may be due in turn for ever.
        overdue = now - self._report.last_success > self._clock.timing.drain_give_up_s
        if not (is_idle or overdue) or self.is_replicating:
            return False
        left = {operation.op_id for operation in self._queue.look(self._tier)}
        # Permanent failures are no reason to stay: the next start may have other credentials than ours.
        begun = [begun for op_id, begun in self._begun.items() if op_id in left]
        # Each part that comes is a success.
        patience_s = self._stores.config.support.wait_timeout_s
        waits = any(each.arrivals is not None and now - each.moved < patience_s for each in begun)
        if left and (waits or not overdue) and not (is_idle and begun and all(each.permanent for each in begun)):
            return False
        if left:
            text = "leaving %d operations for the next start to take up. Last error: %s"
            self._log.error(text, len(left), self._report.now.last_error or "none")
        return True

    # ------------------------------------------------------------------------------ operations
    def _execute(self, operation: Request, operations: list[Request]) -> None:
        """Does the next possible step of an operation in the queue, and notes its outcome."""
        begun, stored = self._begun.get(operation.op_id), operation.stored
        started = self._clock.monotonic() if begun is None or begun.began is None else begun.began
        fate: commit.Fate | Literal["waits"] = "committed"
        state: OutcomeState = "committed"
        said = ""
        try:
            if stored is not None:
                fate = self._save(stored)
            elif operation.action == "cancel":
                self._cancel(operation, operations)
            else:
                store = self._stores.get(operation.place)
                if operation.action == "copy":
                    self._copy(operation, store, self._queue.journal(operation.op_id))
                elif operation.action == "alias":
                    copies.put_alias(store, operation.name, operation.target, before=operation.op_id)
                elif operation.action == "retain":
                    state, said = self._retain(operation, operations, store)
                elif self._is_due(operation, store):
                    sweep.delete(store, operation.name, before=operation.op_id, clock=self._clock)
        except _Stopped:
            return
        except Exception as error:
            # Any error is this operation's own: the drain has others to carry out.
            self._failed(operation, error, self._clock.monotonic() - started)
            return
        if fate == "waits":
            return
        if fate == "replaced":
            self._give_up(operation, "a later save has taken its name", answers=True)
            return
        if said:
            self._log.warning("retention%s: %s", " skipped" if state == "skipped" else "", said)
        if state == "skipped":
            self._finish(operation, state, said)
            return
        if begun is not None and begun.permanent:
            self._begun.allow(self._clock.monotonic())
        seconds, size = self._clock.monotonic() - started, self._begun.get(operation.op_id, Begun()).size
        self._finish(operation, state, said, seconds=seconds)
        if stored is not None:
            part = stored.part
            # Before it leaves the queue: else a caller that waits for the queue would find only failed saves there.
            for old in superseded(operations, self._begun.lost(part), operation):
                self._give_up(old, f"superseded by {part.name}", answers=True)
            # After the outcome: a drain that dies in between finds it committed, and reports it again.
            self._mark_drained(stored)
            what = "is durable" if part.commits else f"has its part of rank {part.rank} on the durable tier"
            what += f": {rate(size or part.content.size, seconds)}"
            self._log.info("%s%s %s", of_step(part.content.step), part.name, what)
        if not any(each.failures for each in self._begun.values()):
            self._report.now.last_error = ""
        if stored is None or stored.part.commits:
            # One drain looks for the remains of all nodes' drains: the coordinator's, which has most other requests.
            self._stores.abort_abandoned(operation.place)

    def _save(self, stored: StoredPart) -> commit.Fate | Literal["waits"]:
        """Does the next possible step for a part in memory: sends it, waits for other nodes' parts, commits."""
        part, rows = stored.part, None
        is_alone, timeout_s, clock = part.content.parts == 1, self._stores.config.support.wait_timeout_s, self._clock
        store, journal = self._stores.get(part.place), self._queue.journal(stored.op_id)
        with self._report.uploading(part.name, part.content.size), reading(stored) as files:
            if not is_alone:
                with contextlib.nullcontext() if commit.is_sent(journal) else self._begun.sending(stored.op_id, clock):
                    fate = commit.put_part(store, part, files, journal=journal, progress=self._progress, clock=clock)
                if fate == "sent" and not part.commits:
                    self._sent[part.save_id] = part, clock.monotonic()
                if fate == "replaced" or not part.commits:
                    return fate
                if fate == "sent" and (rows := self._begun.gather(store, part, timeout_s, clock)) is None:
                    return "waits"
            fate = commit.commit(store, part, files, rows, journal=journal, progress=self._progress, clock=clock)
        if fate != "replaced":
            self._sweep(store, part)
        return fate

    def _sweep(self, store: Store, committed: Part) -> None:
        """Removes saves that no manifest names, now and then after a commit; an error does not undo the commit."""
        survey, now, age_s = self._survey(committed.place), self._clock.monotonic(), self._age_s()
        if now < survey.due:
            return
        survey.due = now + age_s / _REFRESHES
        live = {ids.save_id_of_op(each.op_id) for each in self._queue.look(self._tier) if each.action in SAVES}
        try:
            stored = written(store, ids.manifest_key(committed.name))
            gone = sweep.sweep(store, survey, before=stored - age_s, live=live - {committed.save_id}, clock=self._clock)
        except TieredCheckpointError as error:
            # A manifest that can't be read stays so from save to save.
            if str(error) != survey.logged:
                self._log.warning("could not remove all that is left of incomplete saves: %s", error)
            survey.logged = str(error)
            return
        for save_id, name in gone:
            self._log.warning("save %s of %s never became complete, or was deleted: removed its objects", save_id, name)

    def _age_s(self) -> float:
        return float(self._stores.config.support.sweep_age_s)

    def _keep_alive(self) -> None:
        """Refreshes, now and then, the live saves of which this node has, or has sent, one of several parts."""
        clock = self._clock
        if clock.monotonic() < self._refresh_at or not self._refreshing.acquire(blocking=False):
            return
        try:
            # A failed refresh is repeated well within the age.
            with contextlib.suppress(TieredCheckpointError, OSError):
                queued = [each.part for each in self._tier.parts() if each.pending and each.part.content.parts > 1]
                live = {part.save_id: part.place for part in queued}
                sent = dict(self._sent)
                for save_id, (part, since) in sorted(sent.items()):
                    # The saves of a series are committed in their order.
                    series = {each.save_id: each for each, _ in sent.values() if each.series_key == part.series_key}
                    is_old = clock.monotonic() - since > clock.timing.abandoned_s
                    if is_old or self._is_past(part) or self._is_past(series[max(series)]):
                        del self._sent[save_id]
                    else:
                        live[save_id] = part.place
                for save_id in sorted(live):
                    sweep.refresh(self._stores.get(live[save_id]), save_id)
            with contextlib.suppress(TieredCheckpointError, OSError):
                self._refresh_at = clock.monotonic() + self._age_s() / _REFRESHES
        finally:
            self._refreshing.release()

    def _is_past(self, part: Part) -> bool:
        """Returns True if a sent part's save is committed, or given up for a later one."""
        manifest = current(self._stores.get(part.place), part.name)
        return commit.is_committed(manifest, part) or commit.gone_past(manifest, part, self._clock)

    def _survey(self, place: Place) -> sweep.Survey:
        return self._surveys.setdefault(place, sweep.Survey())

    def _copy(self, operation: Request, store: Store, journal: UploadJournal) -> None:
        """Makes a name a copy of another; logs once for each durable tier why the tier can't copy."""
        refused = copies.put_copy(
            store,
            operation.name,
            operation.target,
            save_id=operation.op_id,
            dirpath=operation.dirpath,
            journal=journal,
            progress=self._progress,
            clock=self._clock,
        )
        if refused is not None and operation.place not in self._refused:
            self._refused.add(operation.place)
            text = "the durable tier can't copy objects, so %s is an alias, as always with save_last='link': %s"
            self._log.warning(text, operation.name, refused)

    def _is_due(self, delete: Request, store: Store) -> bool:
        """Returns True if the save that a delete follows is there; raises if a checkpoint stays as it is not."""
        followed = self._queue.outcome(delete.target) if delete.target else None
        if not delete.target or (followed is not None and followed.state == "committed"):
            return True
        if current(store, delete.name) is None:
            return False
        text = f"{delete.name} stays, as the save that its delete follows did not reach the durable tier;"
        text += " `tiered-ckpt prune` finds what is too many"
        raise CheckpointNotFoundError(text, operation="drain", tier="durable", key=delete.name)

    def _retain(self, operation: Request, operations: list[Request], store: Store) -> tuple[OutcomeState, str]:
        """Applies the policies; returns the outcome, and the reason why it was not done, or the server's refusals."""
        if operation.place != self._stores.place:
            return "skipped", f"{operation.dirpath} is another dirpath than that of the run which is here now"
        policies = policies_from(self._stores.config.retention)
        survey = self._survey(operation.place)
        other = holder_of(store)
        if other is not None and other.owner != operation.name.removeprefix(RETENTION):
            text = f"{other.who} holds the lease of {operation.dirpath}, and removes what its own policies do not keep"
            return "skipped", text
        queued = [each for each in operations if each.place == operation.place and each.action in NAMING]
        needed = {name for each in queued for name in (each.name, each.target)}
        for each in retention.removed(store, policies, survey, needed=needed, clock=self._clock):
            if each.is_gone:
                self._log.info("retention removed %s: no policy keeps it", each.checkpoint.name)
            # There may be thousands, if the policies are new.
            if self._stop.is_set() or self._has_save():
                self._begun.setdefault(operation.op_id, Begun(is_cleanup=True))
                raise _Stopped
        refused, survey.refused = survey.refused, []
        return "committed", retention.refused_text(refused) if refused else ""

    def _has_save(self) -> bool:
        """Returns True if a queued save is due now."""
        now = self._clock.monotonic()
        saves = [each.op_id for each in self._queue.look(self._tier) if each.action in SAVES]
        return any(self._begun.get(op_id, Begun()).due <= now for op_id in saves)

    def _progress(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._report.add(count)
        self._keep_alive()

    def _cancel(self, operation: Request, operations: list[Request]) -> None:
        save_id = ids.save_id_of_op(operation.target)
        cancelled = [each for each in operations if each.action in SAVES and ids.save_id_of_op(each.op_id) == save_id]
        if any(self._has_come(each) for each in cancelled):
            self._log.info("%s is not given up: its last parts have come", cancelled[0].name)
            return
        for other in cancelled:
            self._give_up(other, "cancelled to keep the queue bounded")

    def _has_come(self, operation: Request) -> bool:
        """Returns True if all awaited parts of a save have arrived; then the save is due now."""
        stored, begun = operation.stored, self._begun.get(operation.op_id)
        if stored is None or not stored.part.commits or stored.part.content.parts == 1:
            return False
        if begun is None and commit.is_sent(self._queue.journal(operation.op_id)):
            # An earlier drain sent it.
            begun = self._begun.waits(stored.part, self._clock)
        # A save that failed after it was spared is not spared again: else the queue would grow.
        if begun is None or begun.arrivals is None or begun.failures > begun.failures_when_spared:
            return False
        try:
            begun.arrivals.look(self._stores.get(operation.place))
        except Exception as error:
            # The queue stays bounded after any error.
            self._log.warning("could not look for the parts of %s: %s", operation.name, error)
            return False
        if begun.arrivals.missing:
            return False
        begun.due, begun.failures_when_spared = self._clock.monotonic(), min(begun.failures_when_spared, begun.failures)
        return True

    def _give_up(self, operation: Request, reason: str, *, answers: bool = False) -> None:
        """Ends an operation that will not be carried out; with ``answers``, the durable tier answered just now."""
        stored, journal = operation.stored, self._queue.journal(operation.op_id)
        assert stored is not None, operation
        if journal.read() is not None and (answers or not self._begun.get(operation.op_id, Begun()).failures):
            # An upload that cannot be abandoned now is found by the next look for stale uploads.
            with contextlib.suppress(TieredCheckpointError):
                commit.abandon(self._stores.get(operation.place), stored.part, journal)
        self._log.warning("%s will not be durable: %s", operation.name, reason)
        self._finish(operation, "skipped", reason)
        self._mark_drained(stored)

    # -------------------------------------------------------------------------------- outcomes
    def _failed(self, operation: Request, error: Exception, seconds: float) -> None:
        self._report.now.last_error = str(error)
        if operation.stored is not None and _type_of(error) == DAMAGED_IN_MEMORY:
            self._finish(operation, "failed", error)
            where = self._tier.quarantine(operation.stored.folder, str(error))
            self._queue.ring()
            self._log.error("%s is corrupt in memory and was moved to %s: %s", operation.name, where, error)
        elif isinstance(error, CheckpointNotFoundError) or (isinstance(error, ConfigError) and error.reason == "held"):
            # A save that was removed from memory, or an alias whose target was given up: then the old alias still names
            # a good checkpoint. Or a delete of a checkpoint that another program uses.
            self._log.warning("%s", error)
            self._finish(operation, "skipped", error)
        else:
            begun = self._begun.setdefault(operation.op_id, Begun(is_cleanup=operation.action in TIDYING))
            last = max((each.due for each in self._begun.refused), default=0.0)
            begun.failed(error, self._clock, last)
            if begun.failures == 1:
                known = isinstance(error, TieredCheckpointError | OSError)
                text = "%s of %s failed, to be tried again: %s"
                self._log.error(text, operation.action, operation.name, error, exc_info=None if known else error)
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
        self._report.counts["uploaded" if operation.action == "part" and state == "committed" else state] += 1
        content = operation.stored.part.content if operation.stored is not None else None
        begun = self._begun.get(operation.op_id, Begun())
        if final:
            self._begun.pop(operation.op_id, None)
        sent_s, mine = (seconds if begun.began is None else begun.sent_s), 0
        if state == "committed":  # The rate of an earlier drain's uploads is not known.
            mine = content.size if content is not None else 0
            self._report.succeeded(mine if sent_s else 0, sent_s)
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
            self._clock.wall(),
            begun.failures + (final and state != "skipped"),
            operation.dirpath,
            operation.server,
        )
        note(
            self._tier.root,
            "upload",
            clock=self._clock,
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
            self._queue.finish(outcome, final=final)
        except MemoryFullError as full:
            # No log could be made: memory was full already when this drain started. Further work frees memory.
            self._log.error("could not note the outcome of %s: %s", operation.name, full)

    def _mark_drained(self, stored: StoredPart) -> None:
        """Notes in memory that the durable tier needs nothing more of a part."""
        try:
            self._tier.mark_drained(stored)
        except OSError as error:
            self._log.error("could not mark %s as uploaded, so node memory keeps it: %s", stored.part.name, error)
            self._begun.setdefault(stored.op_id, Begun()).failed(error, self._clock)
        self._queue.ring()


def _type_of(error: Exception) -> str:
    is_damaged = isinstance(error, CorruptCheckpointError) and error.tier == "memory"
    return DAMAGED_IN_MEMORY if is_damaged else getattr(error, "reason", None) or type(error).__name__
