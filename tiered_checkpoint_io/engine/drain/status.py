"""Reports about saves, the drain and each of its operations; and the tiers of a node's checkpoints.

Each outcome is one line of the trainer's log, and each failure is raised once, if at all. An operation that an earlier
start has queued failed there: this process only warns of that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.operations import DAMAGED_IN_MEMORY, NAMING, SAVES, Outcome, Request
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.engine.drain.stores import Stores
from tiered_checkpoint_io.errors import DrainError, SaveError
from tiered_checkpoint_io.logs import CheckpointLogger, names_text, rate
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place

if TYPE_CHECKING:
    from tiered_checkpoint_io.engine.drain.client import DrainHandle

T = TypeVar("T")
#: The log of the drain's process, below the memory tier's root.
LOG = Path("status", "drain.log")
#: Bytes of that log: some five thousand saves, in node memory.
_MAX_LOG = 1 << 20
#: The default of ``memory_dir``.
_SHM = "/dev/shm"  # noqa: S108
#: Outcomes that are kept for a caller that does not poll.
_UNREAD = 256


# -------------------------------------------------------------------------------------------------- saves
def tier_label(dirpath: str) -> str:
    """Returns the name of a durable tier in messages."""
    return "S3" if ids.is_s3_url(dirpath) else dirpath


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Result of a save.

    Attributes:
        name: The checkpoint's name.
        step: Its training step; -1 if the state has none.
        save_id: The save's id.
        size: Bytes.
        stall_s: Seconds for which the caller waited.
        tiers: Tiers that have the checkpoint, or will get it.
        queued: True if its upload is still queued.
        spilled: True if the part is in the spill, on the node's disk.
        capture_s: Seconds of the copy of the state; 0 if the copy continues after the save returned.
        overlapped: True if the state was copied during training, and not within the stall.
        resumable: True if training can resume from it.
    """

    name: str
    step: int
    save_id: str
    size: int
    stall_s: float
    tiers: frozenset[str]
    queued: bool = False
    spilled: bool = False
    capture_s: float = 0.0
    overlapped: bool = False
    resumable: bool = True

    @property
    def is_durable(self) -> bool:
        """True if the durable tier has the checkpoint by now."""
        return "durable" in self.tiers and not self.queued

    def line(self, dirpath: str, what: str = "") -> str:
        """Returns the line to log: the checkpoint's tiers by now, and the pending work; ``what`` replaces the name."""
        places = "the node's disk" if self.spilled else "memory"
        if self.is_durable:
            places = f"{places} and {tier_label(dirpath)}"
        took = rate(self.size, self.capture_s if self.overlapped else self.stall_s)
        text = f"saved {what or self.name} to {places}: {took}"
        if self.overlapped:
            text = f"{text} beside training, which waited {self.stall_s:.3f} s"
        return f"{text}; upload to {tier_label(dirpath)} queued" if self.queued else text


class Saved(NamedTuple):
    """A checkpoint, by its name and step; the step is -1 if it is not known."""

    name: str
    step: int

    def __str__(self) -> str:
        is_told = self.step < 0 or ids.step_in_name(self.name) == self.step
        return self.name if is_told else f"{self.name} (step {self.step})"


@dataclass(frozen=True, slots=True)
class Standing:
    """A node's knowledge of a job's checkpoints; ``memory`` is the newest in the node's memory, if any.

    Attributes:
        uploaded: Checkpoints that were uploaded and not deleted since, the newest first, by the operation log. Their
            owner may have deleted them on the durable tier.
        pending: Checkpoints whose upload is queued, or has failed and is tried again; in order.
        resumable: True if training can resume from some of them, as far as this is known.
    """

    memory: Saved | None = None
    uploaded: tuple[Saved, ...] = ()
    pending: tuple[Saved, ...] = ()
    resumable: bool = True


def standing_of(
    parts: Iterable[StoredPart],
    outcomes: Iterable[Outcome],
    operations: Iterable[Request],
    place: Place,
    last_save: SaveReport | None = None,
) -> Standing:
    """Returns a node's knowledge, by its memory, the operation log, and the newest save of this process."""
    own = [each for each in parts if each.part.place == place]
    held = max(own, key=lambda each: each.save_id, default=None)
    there: dict[str, tuple[str, Saved]] = {}
    for outcome in sorted(outcomes, key=lambda each: each.op_id):
        if outcome.state == "committed" and outcome.place == place:
            if outcome.action == "save":
                there[outcome.name] = (outcome.op_id, Saved(outcome.name, outcome.step))
            elif outcome.action == "delete":
                there.pop(outcome.name, None)
    pending = {each.name: each.stored for each in operations if each.action in SAVES and each.place == place}
    weights = {each.part.name for each in own if not each.part.content.resumable}
    if last_save is not None and not last_save.resumable:
        weights.add(last_save.name)
    uploaded = tuple(saved for _, saved in sorted(there.values(), reverse=True))
    return Standing(
        Saved(held.part.name, held.part.content.step) if held is not None else None,
        uploaded,
        tuple(Saved(name, stored.part.content.step if stored else -1) for name, stored in pending.items()),
        any(each.part.content.resumable for each in own) or any(each.name not in weights for each in uploaded),
    )


# ----------------------------------------------------------------------------------------------- messages
def say_outcome(
    log: CheckpointLogger,
    outcome: Outcome,
    config: TieredCheckpointConfig,
    *,
    leads: bool = True,
    inherited: bool = False,
) -> SaveError | None:
    """Logs the outcome of a queued operation, if that concerns the user.

    Only the process that ``leads`` its node logs failures above DEBUG. A failure that an earlier start has queued, and
    so is ``inherited``, is a warning.

    Returns:
        The failure, if it is one.
    """
    log = log.at_step(outcome.step)
    warn = log.warning if leads else log.debug
    what = outcome.action, outcome.state
    if what == ("save", "committed"):
        where, amount = tier_label(outcome.dirpath), rate(outcome.bytes, outcome.seconds)
        log.info("%s is durable on %s: %s", outcome.name, where, amount)
    elif what == ("retain", "committed") and outcome.error:
        warn("retention: %s", outcome.error)
    elif what == ("retain", "skipped"):
        warn("retention skipped: %s", outcome.error)
    elif what == ("delete", "skipped"):
        warn("%s was not deleted: %s", outcome.name, outcome.error)
    elif outcome.state == "skipped" and outcome.action in (*NAMING, *SAVES):
        warn("%s will not be durable: %s", outcome.name, outcome.error)
    elif outcome.state == "failed" and outcome.action != "cancel":
        failure = failure_of(outcome, config)
        say = warn if inherited or not leads else log.error
        say("%s%s — %s", "of an earlier start: " if inherited else "", failure.message, failure.hint)
        return failure
    return None


def failure_of(outcome: Outcome, config: TieredCheckpointConfig) -> SaveError:
    """Returns the error of an operation that failed in the background: the cause, the consequence, and the advice."""
    what = {"save": outcome.name, "retain": "retention"}.get(outcome.action, f"{outcome.action} of {outcome.name}")
    again = f"is tried again; by hand: {drain_command(config)}"
    hint = f"it stays {'in node memory' if outcome.action in SAVES else 'queued'} and {again}"
    # An alias or delete finds damage on the durable tier, and nothing in memory was touched.
    if outcome.error_type == DAMAGED_IN_MEMORY and outcome.action in SAVES:
        hint = "its copy in node memory was moved to quarantine/, and it is not tried again"
    return SaveError(
        f"{what} did not reach the durable tier: {outcome.error}",
        operation=outcome.action,
        tier="durable",
        key=outcome.url,
        step=ids.known(outcome.step),
        hint=hint,
    )


def not_uploaded(pending: Sequence[Saved], config: TieredCheckpointConfig, error: DrainError) -> tuple[str, SaveError]:
    """Returns the message about a queue that is left at the end: a line for the log, and an error."""
    names = names_text([each.name for each in pending])
    what = "queued aliases and deletes were not done"
    if pending:
        what = f"{len(pending)} queued checkpoint{'s were' if len(pending) > 1 else ' was'} not uploaded ({names})"
    # The log has the failures already. A drain that has not failed is slow, and the hint has its last words.
    has_failed = error.hint is None or "stays in node memory" in error.hint
    full = f"{what}: {error.message}" if has_failed else f"{what}: {error.message}; {error.hint}"
    stay = "they stay" if len(pending) != 1 else "it stays"
    hint = f"{stay} in node memory; retry with: {drain_command(config)}"
    left = SaveError(full, operation="drain", tier="durable", key=config.dirpath, hint=hint)
    return what if has_failed else full, left


def drain_command(config: TieredCheckpointConfig) -> str:
    """Returns the command that works on the queue of a job."""
    place = "" if config.memory_dir == _SHM else f" --memory-dir {config.memory_dir}"
    return f"tiered-ckpt flush --namespace {config.namespace}{place}"


# ----------------------------------------------------------------------------------------------- outcomes
class Announcer:
    """Logs each outcome once, and keeps each failure for one who asks. Several threads may use it."""

    def __init__(self, config: TieredCheckpointConfig, log: CheckpointLogger, counts: Counter[str]) -> None:
        """Takes the job's configuration, its log, and the counter of failures."""
        self._config = config
        self._log = log
        self._counts = counts
        self._lock = threading.RLock()
        self._unread: deque[Outcome] = deque(maxlen=_UNREAD)
        self._unshown: list[SaveError] = []
        self._trouble = ""

    def look(self, drain: DrainHandle, *, leads: bool) -> None:
        """Logs new outcomes, and counts the failed uploads that this start has queued; ``leads`` as elsewhere."""
        with self._lock:
            fresh, trouble = looking(self._log, lambda: drain.news(keeps_up=leads), (list[Outcome](), ""))
            self._unread.extend(fresh)
            for outcome in fresh:
                inherited = drain.is_inherited(outcome)
                failure = say_outcome(self._log, outcome, self._config, leads=leads, inherited=inherited)
                if failure is not None and not inherited:
                    self._counts["failed"] += leads and outcome.action in SAVES
                    self._unshown.append(failure)
            if trouble and trouble != self._trouble and leads:
                text = "the drain can't get at its queue, so nothing is uploaded; it tries again: %s"
                self._log.error(text, trouble)
            self._trouble = trouble

    def take(self) -> list[Outcome]:
        """Returns the outcomes since the last call."""
        with self._lock:
            fresh, self._unread = [*self._unread], deque(maxlen=_UNREAD)
        return fresh

    def first_failure(self) -> SaveError | None:
        """Returns the first failure since the last call."""
        with self._lock:
            failures, self._unshown = self._unshown, []
        return failures[0] if failures else None


def looking(log: CheckpointLogger, look: Callable[[], T], otherwise: T) -> T:
    """Returns the result of a look at the queue, or ``otherwise`` if the queue cannot be read just now."""
    try:
        return look()
    except OSError as unread:
        # For example, no file descriptor is left: training continues, and the next call looks again.
        log.error("could not read the outcomes of earlier saves: %s", unread)
        return otherwise


# ---------------------------------------------------------------------------------------------- the drain
class StandstillError(DrainError):
    """The drain has made no progress within the bound of a caller's wait."""


class Reporter:
    """Collects a drain's figures, and writes them to the log for the trainer.

    ``now`` are the figures that do not change by themselves, ``counts`` the ended operations, by how they ended, and
    ``last_success`` is when something last went well, by the monotonic clock.
    """

    def __init__(self, queue: Queue, stores: Stores, clock: Clock) -> None:
        """Takes the queue to write to, and the stores whose requests are counted."""
        self._queue = queue
        self._stores = stores
        self._clock = clock
        self._lock = threading.Lock()
        self._started = 0.0
        self.now = DrainProgress(os.getpid())
        self.counts: Counter[str] = Counter()
        self.last_success = clock.monotonic()

    @contextlib.contextmanager
    def beating(self, also: Callable[[], None]) -> Iterator[None]:
        """Writes the figures, and does ``also``, again and again, from a thread, while the block runs."""
        ended = threading.Event()

        def beat() -> None:
            timing = self._clock.timing
            while not self._clock.wait(ended, timing.heartbeat_s if self.now.name else timing.idle_heartbeat_s):
                self.write()
                also()

        thread = self._clock.start(beat, "tiered-heartbeat")
        try:
            yield
        finally:
            ended.set()
            self._clock.join(thread, self._clock.timing.log_lock_s)
            self.write()

    @contextlib.contextmanager
    def uploading(self, name: str, size: int) -> Iterator[None]:
        """Says that a checkpoint of ``size`` bytes is in work while the block runs."""
        self._started = self._clock.monotonic()
        self.now = replace(self.now, name=name, bytes_done=0, bytes_total=size)
        self.write()
        try:
            yield
        finally:
            self.now = replace(self.now, name="", bytes_done=0, bytes_total=0)

    def add(self, count: int) -> None:
        """Counts bytes that reached the durable tier; for many threads."""
        with self._lock:
            self.now.bytes_done += count
        self.last_success = self._clock.monotonic()

    def succeeded(self, size: int, seconds: float) -> None:
        """Takes the rate of an operation; ``size`` is 0 for operations without an upload."""
        self.last_success = self._clock.monotonic()
        if size:
            self.now.rate = size / max(seconds, 1e-9)

    def write(self) -> None:
        """Writes the figures once."""
        counters, error = Counter(self.counts), self.now.last_error
        for store in self._stores.all():
            counters.update(store.metrics.snapshot())
            # A request that is repeated for minutes has not failed yet.
            error = store.metrics.retrying or error
        now = replace(self.now, heartbeat=self._clock.wall(), counters=dict(counters), last_error=error)
        if now.name:
            now.rate = now.bytes_done / max(self._clock.monotonic() - self._started, 1e-9)
        # Without a log, or a descriptor to open it, the figures are lost.
        with contextlib.suppress(OSError):
            self._queue.write_progress(now)


def shorten_log(root: Path) -> None:
    """Cuts a too long log to its newer half: the same file, because its writers have it open."""
    with contextlib.suppress(OSError):
        if (root / LOG).stat().st_size > _MAX_LOG:
            with (root / LOG).open("r+b") as file:
                file.seek(-_MAX_LOG // 2, os.SEEK_END)
                newer = file.read().partition(b"\n")[2]
                file.seek(0)
                file.truncate()
                file.write(newer)
