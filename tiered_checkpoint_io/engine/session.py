"""One process's state of one job: both tiers, the drain, ids, counters. Opened on first use."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.log import note
from tiered_checkpoint_io.engine.drain.operations import NAMING, SAVES, Outcome, Request
from tiered_checkpoint_io.engine.drain.status import (
    Announcer,
    Saved,
    SaveReport,
    Standing,
    looking,
    not_uploaded,
    standing_of,
)
from tiered_checkpoint_io.engine.durable.files import read_if_there
from tiered_checkpoint_io.engine.durable.manifests import names_of
from tiered_checkpoint_io.engine.leasing import Claims, launch_rank, make_room
from tiered_checkpoint_io.engine.ranks.run import (
    current_rank,
    current_run,
    current_world_size,
    leads_node,
    may_lead_node,
)
from tiered_checkpoint_io.engine.replication.meeting import Peering, address_here, awaited_in
from tiered_checkpoint_io.engine.staging import BackgroundTask, Capturer, HostPins, SaveIds, Turn
from tiered_checkpoint_io.errors import DrainError, SaveError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, get_logger
from tiered_checkpoint_io.memory.node import MemoryFullError, node_budget, register_owner
from tiered_checkpoint_io.memory.tier import MemoryTier, note_budget, spill_dir_of
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.stores import Store, open_store, place_of
from tiered_checkpoint_io.stores.peer import Endpoint
from tiered_checkpoint_io.stores.retry import Question, answer_within


class DurableNameCache:
    """The names that were listed once, with this process' saves and removals since."""

    def __init__(self, session: Session) -> None:
        """Asks nothing yet."""
        self._session = session
        self._question: Question[Iterable[str]] | None = None
        self._listed: set[str] | None = None
        self._saved: set[str] = set()

    def remember(self, listed: Iterable[str]) -> None:
        """Takes the names on the durable tier, as they were just listed."""
        tier, _, drain = self._session.open()
        queued = (each.name for each in drain.queue.look(tier) if each.action in (*NAMING, *SAVES))
        self._listed = {*listed, *queued}

    def note(self, name: str, *, exists: bool) -> None:
        """Takes note of a name that this process saves or removes."""
        for names in (self._saved, self._listed):
            if names is not None:
                (names.add if exists else names.discard)(name)

    def may_be_durable(self, name: str) -> bool:
        """Returns True if the durable tier may have a name; sends no request. A process that has not listed the names
        does not know earlier processes' saves, if a drain has uploaded them.
        """
        if name in self._saved:
            return True
        if self._listed is None:
            return self._session.open().drain.has_worked
        return name in self._listed

    def all(self, patience_s: float = math.inf) -> frozenset[str]:
        """Returns all names on the durable tier, or queued for it: one LIST at first use, none later.

        Raises StoreError if the tier could not be read, or was silent for ``patience_s``; by default until its store
        gives up.
        """
        if self._listed is None:
            # Saves since the names were asked for may be committed already.
            self.remember([*self._ask(patience_s), *self._saved])
        return frozenset(self._listed or ())

    def close(self) -> None:
        """Ends the wait for an answer."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _ask(self, patience_s: float) -> Iterable[str]:
        # A question that was not answered in time is not asked again: the next caller has its answer, or no wait.
        session = self._session
        question = self._question = self._question or Question(lambda: names_of(session.durable()), clock=session.clock)
        if not question.within(patience_s):
            raise question.silence("the durable tier", patience_s)
        self._question = None
        return question.result()


class Opened(NamedTuple):
    """Resources that a session opens on first use."""

    tier: MemoryTier
    capturer: Capturer
    drain: DrainHandle


class Session:
    """Both tiers of one job, as one process uses them.

    Attributes:
        counts: ``saved``, ``failed`` and ``skipped`` saves of this process; parts that are ``replicated``, and that are
            ``unreplicated`` although they should be.
        last_save: The newest save of this process.
        followed: The id of the newest save that this process began for the durable tier; empty before the first.
        background: The end of a save that runs during training.
        place: Durable tier, by the environment when it is first asked for.
        is_last: True if no save follows: the durable tier takes this one, even if its queue is full.
        is_preempted: True if the job was asked to end: failures are only logged, and its exit status stays.
    """

    place: functools.cached_property[Place] = functools.cached_property(lambda self: place_of(self.config))

    def __init__(self, config: TieredCheckpointConfig, *, logger: Logger | None = None, clock: Clock = SYSTEM) -> None:
        self.config = config
        self.clock = clock
        self.dirpath = config.dirpath
        rank = current_rank() or (launch_rank() if current_world_size() == 1 else 0)
        self.log = get_logger(config.namespace, rank=rank, log_dir=config.log_dir, logger=logger)
        self.forked()
        register_owner(self)

    def forked(self) -> None:
        """Begins again: see :class:`node.Owner`."""
        config, clock = self.config, self.clock
        self.counts: Counter[str] = Counter()
        self.last_save: SaveReport | None = None
        self.followed = ""
        self.known = DurableNameCache(self)
        wait_s = float(config.support.wait_timeout_s)
        self.background, self.turn = BackgroundTask(wait_s, self.log), Turn(wait_s)
        self._pins = HostPins()
        self._opened: Opened | None = None
        self._stores: dict[str, Store] = {}
        self._peering, self._opening = Peering(config, self.counts, clock, self.serve), threading.Lock()
        self._asked: Counter[str] = Counter()
        self._announcer = Announcer(config, self.log, self.counts)
        self._standing = Standing()
        self.claims = Claims(
            config,
            self.log,
            clock,
            root=lambda: self.open().tier.root,
            store=self.durable,
            in_time=self._in_time,
            follows=lambda: self.save_ids.seen is not None,
        )
        self.save_ids = SaveIds(
            clock,
            self.log,
            held=lambda: [each.save_id for each in self.open().tier.parts()],
            learnt=lambda: self.claims.newest,
            met_others=self.claims.met_others,
        )
        self.warned: set[str] = set()
        self._leave_by: float | None = None
        self.is_preempted = self.is_last = False

    # ------------------------------------------------------------------------------------- tiers
    def open(self) -> Opened:
        """Returns the memory tier, the capturer and the drain's handle, once the background task has ended.

        Raises DrainError if that takes longer than ``wait_timeout_s``, and MemoryTierError if memory_dir is missing,
        not safe to use, or can't be written.
        """
        self.background.wait()
        if self._opened is None:
            config, folder = self.config, self.config.memory_dir
            budget = node_budget(config.memory_allocation_percentage, folder) if os.path.isdir(folder) else None
            here, unmap, say = config.namespace, self._pins.unpin, functools.partial(self.warn, None)
            tier = MemoryTier.open(folder, here, budget_bytes=budget, unmap=unmap, clock=self.clock, say=say)
            note_budget(tier)
            tier.use_spill(config.spill_dir)
            tier.place, tier.find_room = self.place, lambda missing: make_room(tier, missing, self.log, self.clock)
            if config.replication_factor > 1:
                tier.awaited = awaited_in
                tier.on_commit = lambda stored: self._peering.committed(stored, self.log)
            # Its process may have another temporary directory.
            found = replace(config, spill_dir=spill_dir_of(config.spill_dir))
            drain = DrainHandle(tier, found, self.log, clock=self.clock)
            drain.leave_by, self._opened = self._leave_by, Opened(tier, Capturer(tier, self._pins, self.clock), drain)
        elif self._opened.tier.mend():
            note_budget(self._opened.tier)
            self.log.warning("%s was removed, with all that it held; it is made again", self._opened.tier.root)
        return self._opened

    def durable(self, dirpath: str | None = None) -> Store:
        """Opens the durable tier; another one if a dirpath is given."""
        wanted = self.dirpath if dirpath is None else dirpath
        with self._opening:
            # Threads that fetch ask for it all at once.
            if wanted not in self._stores:
                self._stores[wanted] = open_store(self.config, wanted, clock=self.clock)
            return self._stores[wanted]

    def close(self) -> None:
        """Waits for queued work, shows background errors once, and frees everything."""
        try:
            if self._opened is not None:
                self._close_tiers(self._opened)
        finally:
            # Other processes may save here before this session is opened again; its later saves are newer.
            self.save_ids.restart()
            for each in (self.claims, self.known, self.background, current_run()):
                each.close()
            for store in self._stores.values():
                self._asked.update(store.metrics.snapshot())
                store.close()
            self._stores.clear()
            self._leave_by, self.is_preempted = None, False  # The next fit of this process need not end.

    def _close_tiers(self, opened: Opened) -> None:
        self.background.wait()
        tier, capturer, drain = opened
        try:
            self._peering.close(self._in_time(self.config.support.wait_timeout_s))
            try:
                if drain.pending():
                    drain.start()
                    self.wait()
            except Exception as error:
                self._not_drained(error)
            self.surface()
        finally:
            self.standing()
            self._opened = None
            capturer.close()
            drain.close(timeout_s=self.config.support.wait_timeout_s)
            tier.close()

    def _not_drained(self, error: Exception) -> None:
        if not isinstance(error, DrainError):
            self.failed("queued checkpoints", -1, error)
            return
        # The reasons first: each is counted when it is logged. A slow upload has not failed.
        self.look()
        said, left = not_uploaded(self.standing().pending, self.config, error)
        if leads_node():
            self.log.log(logging.WARNING if self._is_leaving else logging.ERROR, "%s — %s", said, left.hint)
        if self._raises and not self._is_leaving:
            self.surface()
            raise left from error

    def release(self) -> None:
        """Gives free slots back to the node at the end of a process; waits only for this process's tasks."""
        if (opened := self._opened) is not None:
            self.background.wait()
            opened.capturer.close()
            opened.tier.close()
        self.claims.release_lease()

    def meet_peers(self, process_group: Any = None, series: str | None = None) -> None:
        """See :meth:`Peering.meet`."""
        if self.config.replication_factor > 1:
            self._peering.meet(lambda: self.open().tier, self.log, process_group, series)

    def serve(self) -> Endpoint | None:
        """Has the drain serve this node's memory to the other nodes of the job; None, with a warning, if it can't."""
        try:
            opened = self._opened if self._opened is not None else self.open()
            return opened.drain.serve(address_here())
        except (TieredCheckpointError, OSError) as error:
            self.log.warning("other nodes can't read this node's memory: %s", error)
            return None

    def note(self, event: str, **facts: Any) -> None:
        """Adds an event to the record of the run, see :mod:`model.events`; any rank notes its own failures."""
        if self._opened is not None and (event in ("failed", "skipped") or leads_node()):
            note(self._opened.tier.root, event, clock=self.clock, **facts)

    def poll(self) -> list[Outcome]:
        """Returns background operations that ended since the last call, each once."""
        self.look()
        return self._announcer.take()

    def look(self) -> None:
        """Looks at the drain: counts and logs each failure once; :meth:`surface` raises it."""
        if self.config.replication_factor > 1:
            self._peering.look()
        if self._opened is not None:
            self._announcer.look(self._opened.drain, leads=leads_node())

    def standing(self) -> Standing:
        """Returns the newest checkpoints and their tiers; for a closed session, as they were at the close."""
        if self._opened is not None:
            tier, queue = self._opened.tier, self._opened.drain.queue
            self._standing = looking(
                self.log,
                lambda: standing_of(tier.parts(), queue.outcomes(), queue.look(tier), self.place, self.last_save),
                self._standing,
            )
        return self._standing

    def newest_of(self, uploaded: Sequence[Saved]) -> Saved | None:
        """Returns the first of some checkpoints that the durable tier still has; raises as :func:`answer_within`."""
        bound = self._in_time(self.config.support.durable_timeout_s)
        found = (each for each in uploaded if read_if_there(self.durable(), each.name))
        return answer_within(bound, lambda: next(found, None), clock=self.clock) if uploaded else None

    @property
    def asked(self) -> dict[str, int]:
        """Requests and bytes that this process itself asked of the durable tier; the drain's are its own."""
        return dict(sum((Counter(store.metrics.snapshot()) for store in [*self._stores.values()]), self._asked))

    def is_pending(self, name: str) -> bool:
        """Returns True if a save or alias of this name is, or may be, still queued for the durable tier."""
        if self._opened is None:
            return False
        tier, _, drain = self._opened
        return self.background.is_running(name) or looking(
            self.log, lambda: any(operation.name == name for operation in drain.queue.look(tier)), otherwise=True
        )

    def outcome(self, save_id: str) -> Outcome | None:
        """Returns the outcome of a save on the durable tier; None if it is queued, or its outcome was forgotten."""
        return None if self._opened is None else self._opened.drain.queue.outcome(save_id)

    def pending(self) -> int:
        """Returns the number of operations that wait for the drain."""
        opened = self._opened
        return 0 if opened is None else looking(self.log, lambda: len(opened.drain.pending()), 0)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until all queued work is on the durable tier.

        Raises DrainError if it is not after ``timeout_s`` (by default ``wait_timeout_s``), or the queue is unreadable.
        """
        if self._opened is None:
            return
        try:
            self.open().drain.flush(self.config.support.wait_timeout_s if timeout_s is None else timeout_s)
        except OSError as unread:
            raise DrainError(f"could not read the queue: {unread}", operation="drain", tier="memory") from unread

    def leave_by(self, deadline: float) -> None:
        """Waits for nothing beyond ``deadline``, by the monotonic clock: the process has to end by then.

        Later uploads stay queued, which is no failure. Holds until the close. A signal handler may call this.
        """
        self._leave_by = deadline
        if self._opened is not None:
            self._opened.drain.leave_by = deadline

    @property
    def _raises(self) -> bool:
        return self.config.on_save_error == "raise" and not self.is_preempted

    def _in_time(self, timeout_s: float) -> float:
        left_s = float("inf") if self._leave_by is None else self._leave_by - self.clock.monotonic()
        return max(0.0, min(float(timeout_s), left_s))

    @property
    def _is_leaving(self) -> bool:
        return self._leave_by is not None and self.clock.monotonic() >= self._leave_by

    def submit(self, action: Literal["alias", "copy", "delete", "retain"], name: str, target: str = "") -> None:
        """Queues an alias, a copy, a delete or retention after earlier saves.

        A delete without a target follows the save that this process began last, or else the newest that is queued. If
        node memory has no room for it, or can't be used, this raises SaveError if ``on_save_error`` is ``raise``.
        """
        try:
            tier, _, drain = self.open()
            if action == "delete" and not target and not (target := self.followed):
                queued = (each for each in drain.queue.look(tier) if each.action in SAVES and each.place == self.place)
                target = max((ids.save_id_of_op(each.op_id) for each in queued), default="")
            drain.submit(Request(self.save_ids.next(), action, name, self.dirpath, target, server=self.place.server))
        except (OSError, DrainError) as refused:
            # OSError: no room, no descriptor, no process, or any other trouble of a node.
            self.not_done(action, name, refused)

    def not_done(self, action: str, name: str, reason: OSError | DrainError) -> None:
        """Does :meth:`failed` for an operation on a name that was refused in node memory."""
        hint = "; ".join(filter(None, ["it is not done", getattr(reason, "hint", None)]))
        text, key = f"{action} of {name} failed: {getattr(reason, 'message', reason)}", ids.join_url(self.dirpath, name)
        error = SaveError(text, operation=action, tier="memory", key=key, hint=hint)
        error.__cause__ = reason
        self.failed(name, -1, error, action)

    def take_up(self, *, saves: bool = False) -> None:
        """Starts the drain for parts that an earlier process left, or that this one saves; on one rank of a node."""
        tier, _, drain = self.open()
        if may_lead_node() and (saves or any(stored.pending for stored in tier.parts())):
            try:
                drain.start()
            except MemoryFullError as full:
                self.log.warning("queued uploads wait until memory_dir has room for the drain: %s", full)
            except DrainError as error:
                self.log.warning("queued uploads wait for the next save: %s", error)

    def surface(self, *, looks: bool = True) -> None:
        """Raises failures of the background, each once, if ``on_save_error`` is ``raise``; calls :meth:`look` first."""
        if looks:
            self.look()
        if (failure := self._announcer.first_failure()) is not None and self._raises:
            raise failure

    def warn(self, what: str | None, text: str) -> None:
        """Logs a warning once; ``what`` is its key, by default the text."""
        if (what := what or text) not in self.warned:
            self.warned.add(what)
            self.log.warning("%s", text, stacklevel=2)

    def count_failure(self, name: str, step: int, error: object, action: str = "save", *, shared: bool = False) -> None:
        """Counts a failure if it is one of a save, and notes it: of one ``shared`` by all ranks, once a node."""
        self.counts["failed"] += action == "save"
        if not shared or leads_node():
            self.note("failed", name=name, step=step, error=str(error), action=action)

    def failed(self, name: str, step: int, error: Exception, action: str = "save", *, shared: bool = False) -> None:
        """Counts a failure as :meth:`count_failure` does, and logs it; raises it if ``on_save_error`` is ``raise``."""
        self.count_failure(name, step, error, action, shared=shared)
        # The error of an operation on a name names the operation.
        text = f"saving {name} failed: {error}" if action == "save" else str(error)
        self.log.at_step(step).error("%s", text)
        if self._raises:
            if isinstance(error, SaveError):
                raise error
            raise SaveError(text, operation=action, key=self.dirpath, step=ids.known(step)) from error
