"""The facts of a save, on which all its ranks agree before they write, and room for it in queues, memory and spill.

There are three ways to obtain facts: *alone*, if one rank has the whole state; *coordinated*, if one rank issues them
and they reach the others with DCP's plan; *uncoordinated*, if each rank derives them from the run's id and the step.
All else is the same for each save: see :mod:`tiered_checkpoint_io.engine.save.saver`.

A save is queued for the durable tier if the queue of each of its nodes has room for one more. A coordinator sees only
the queue of its own node. So each other rank of a coordinated save looks at its own node's queue, and votes; the votes
reach the coordinator with the ranks' DCP plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from tiered_checkpoint_io.engine.ranks.run import LeftBehindError, current_rank, current_run, current_world_size
from tiered_checkpoint_io.engine.retention import Rules
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError, SaveError, StoreError
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart, check_file_name
from tiered_checkpoint_io.memory.tier import AUTO
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import Place, hash_bytes
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Kind, Metric, Part
from tiered_checkpoint_io.version import __version__

_T = TypeVar("_T")
#: Facts and votes that this thread has unpickled, by the name of their class; see :func:`arrived`.
_arrivals = threading.local()


def _arrived(kind: type[_T]) -> list[_T]:
    found: list[_T] = _arrivals.__dict__.setdefault(kind.__name__, [])
    return found


def _arrive(kind: type[_T], *fields: Any) -> _T:
    made = kind(*fields)
    _arrived(kind).append(made)
    return made


class _Noted:
    """Base of data that is noted when it is unpickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(cast("Any", self))
        return _arrive, (type(self), *(getattr(self, each.name) for each in fields))


#: Reason for a save that never overlaps.
OF_PARTS = "of sharded and local checkpoints, only asynchronous ones of TieredModelParallelStrategy overlap training"
#: Reason for the saves after one that failed for a changed state.
FOUND_CHANGED = "a capture has found the state changed"


@dataclass(frozen=True, slots=True)
class SaveFacts(_Noted):
    """Facts of one save that all its ranks agree on; those of :class:`Content` mean the same here.

    Attributes:
        world_size: Number of ranks of the job; for a checkpoint of several parts, of ranks that save one.
        durable: True if it is to go to the durable tier.
        taken: True if another save may have the checkpoint's name: see :func:`may_be_taken`.
        completed: The newest saves of this run that are complete, the oldest first.
        series: Key of the names that these ranks save in turn, see :func:`ids.series_of`; empty for all names.
            ``memory_keep_last`` applies to these together, and a later one replaces an earlier one.
        left_out: True if too many saves wait for the durable tier to take it: see :func:`admit`.
        dirpath: The coordinator's durable tier; empty if it names none, or ranks need not know.
        lacking: Earlier saves that memory will never hold completely, the oldest first.
    """

    name: str
    save_id: str
    step: int
    world_size: int
    durable: bool
    payload: Kind = "sharded"
    taken: bool = False
    completed: tuple[str, ...] = ()
    epoch: int = -1
    metric: Metric | None = None
    series: str = ""
    coordinator: int = -1
    resumable: bool = True
    left_out: bool = False
    dirpath: str = ""
    lacking: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """Mark of this save's files; no other save of the same name has it.

        Neither an overwrite nor a drain that comes late with an earlier save may write to another save's files.
        """
        return hash_bytes(self.save_id.encode())[:8]

    def path(self, rank: int) -> str:
        """Returns the file that holds a rank's state."""
        if self.payload == "full":
            return self.name
        if self.payload == "local":
            return f"{self.name}/{ids.rank_folder(rank)}-{self.mark}.pt"
        return f"{self.name}/__{rank}_0-{self.mark}.distcp"

    def file_name(self, rank: int) -> str:
        """Returns the basename of :meth:`path`."""
        return self.path(rank).rpartition("/")[2]

    def label(self, rank: int) -> str:
        """Returns the name of a rank's part for messages."""
        return self.name if self.payload == "full" else f"shard {rank} of {self.name}"

    def name_beside(self, basename: str) -> str:
        """Returns the name of another file: its own, if no other save of this checkpoint's name can have it."""
        stem, dot, ending = basename.partition(".")
        return f"{stem}-{self.mark}{dot}{ending}" if self.taken else basename

    def rules(self, rank: int, place: Place) -> Rules:
        """Returns the rules of retention in memory for a rank's part."""
        completed = self.completed if self.payload == "sharded" else None
        return Rules(self.save_id, rank, self.payload, place, self.series, completed=completed, lacking=self.lacking)

    def describe(
        self, rank: int, place: Place, files: tuple[FileEntry, ...], *, created: float, namespace: str = ""
    ) -> Part:
        """Returns the description of a rank's part that has these files."""
        switches = {"full": self.name.rpartition("/")[2], "sharded": METADATA, "local": None}
        content = Content(
            save_id=self.save_id,
            step=self.step,
            epoch=self.epoch,
            kind=self.payload,
            created=created,
            world_size=self.world_size,
            writer=versions(),
            files=files,
            metric=self.metric,
            parts=1 if self.payload == "full" else self.world_size,
            coordinator=self.coordinator,
            switch=switches[self.payload],
            resumable=self.resumable,
            namespace=namespace,
        )
        return Part(self.name, rank, content, place.dirpath, self.durable, place.server, self.series)


@dataclass(frozen=True, slots=True)
class ShardRole:
    """A rank's shard of a state of ``degree`` shards; ``writes`` is True for one of the ranks that hold the same."""

    shard: int = 0
    degree: int = 1
    writes: bool = True


def expect_facts() -> None:
    """Forgets the facts that this thread has received."""
    _arrived(SaveFacts).clear()


def arrived() -> SaveFacts | None:
    """Returns the facts that this thread has received since :func:`expect_facts`.

    With ``enable_plan_caching``, DCP's planner receives the coordinator's new plan, facts and all, finds it empty,
    and hands the writer the plan of an earlier save instead. Counting saves on each rank would agree only until one of
    them misses a save, and would not show whether *this* save goes to the durable tier. But the facts did reach every
    rank, in the thread that saves: so unpickling notes them.
    """
    return next(reversed(_arrived(SaveFacts)), None)


def agreed(facts: object, located: ids.Located, dirpath: str, rank: int) -> SaveFacts:
    """Returns the coordinator's facts; SaveError unless this rank saves the same to the same durable tier."""
    if not isinstance(facts, SaveFacts) or facts.name != located.name or facts.step != located.step:
        meant = facts.name if isinstance(facts, SaveFacts) else "an unknown checkpoint"
        raise SaveError(
            f"this rank saves {located.name} (step {located.step}), the coordinator {meant}",
            operation="save",
            rank=rank,
            step=located.step,
            hint="give all ranks the same checkpoint_id and step; if they have them, the planner keeps storage_data"
            " of earlier saves: switch its plan caching off",
        )
    if facts.dirpath != dirpath:
        mine, theirs = (each or "no durable tier" for each in (dirpath, facts.dirpath))
        raise SaveError(
            f"this rank saves {located.name} to {mine}, the coordinator to {theirs}",
            operation="save",
            rank=rank,
            step=located.step,
            hint="give all ranks the same dirpath: make a name that holds the time on one rank, and broadcast it",
        )
    return facts


# -------------------------------------------------------------------------------- how to obtain them
def alone(session: Session, wanted: SaveFacts, state: Any) -> SaveFacts:
    """Completes the facts of a rank that has the whole state; ConfigError for a name that is not allowed."""
    check_file_name(ids.validate_new_name(wanted.name))
    step, epoch = position(state, wanted.name)
    return dataclasses.replace(
        wanted,
        save_id=session.save_ids.next(),
        step=step,
        epoch=epoch,
        world_size=current_world_size(),
        coordinator=current_rank(),
    )


def may_be_taken(session: Session, name: str, step: int, *, durable: bool) -> bool:
    """Returns True if another save, of any run, may have a name: then each save's small files get their own names.

    A look at the durable tier is not enough: a part that an earlier run left on another node may be uploaded at any
    time. Yet a name that contains its step counts as free, so that other tools find the files by their usual names. If
    a run saves the step of an earlier run again, which another node uploads meanwhile, one of the two is refused.
    """
    if ids.step_in_name(name) != step:
        return True
    if any(each.part.name == name and each.part.place == session.place for each in session.open().tier.held()):
        return True
    if not durable:
        # A memory-only save asks nothing; it may be flushed later.
        return session.known.may_be_durable(name)
    try:
        return name in session.known.all(session.config.support.durable_timeout_s)
    except StoreError as error:
        session.log.warning(
            "cannot ask whether %s exists, so the files beside its shards get other names: %s", name, error
        )
        return True


def check_attempt() -> None:
    """Checks that a rank which saves nothing itself was not left behind by those that do, or raises LeftBehindError."""
    try:
        _ = current_run().attempt
    except LeftBehindError:
        raise
    except ConfigError:
        # The store does not answer: it is asked at the next save, and ranks that save wait for it.
        pass


def versions() -> dict[str, str]:
    """Returns the versions of the software that writes a checkpoint."""
    return {
        "tiered_checkpoint_io": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def position(state: Any, name: str) -> tuple[int, int]:
    """Returns the step and the epoch of a state, as it says, or else its name; -1 if neither does."""
    said = state if isinstance(state, dict) else {}
    step = _count(said.get("global_step"))
    return step if step >= 0 else _count(ids.step_in_name(name)), _count(said.get("epoch"))


def _count(value: Any) -> int:
    # A value that no manifest can hold would leave a checkpoint that can't be read.
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return value if fits else -1


@dataclass(frozen=True, slots=True)
class Vote(_Noted):
    """Answer of a rank before a durable save: is its node's queue ``free``, and which save was given up for that."""

    free: bool
    given_up: str


def arrived_votes() -> tuple[Vote, ...]:
    """Returns the votes that this thread has received since :func:`vote`: of ranks that have anything to say."""
    return tuple(_arrived(Vote))


def vote(session: Session, *, durable: bool) -> Vote | None:
    """Returns this rank's vote for the coordinator of a new save; None if there is nothing to say.

    Waits for room in this node's queue.
    """
    _arrived(Vote).clear()
    if not durable or session.is_last or session.is_preempted:
        return None
    free = _is_free(session)
    given_up = session.open().drain.given_up
    return Vote(free, given_up) if given_up or not free else None


def admit(
    session: Session, facts: SaveFacts, held: Collection[StoredPart] = (), votes: Collection[Vote] = ()
) -> SaveFacts:
    """Returns the same facts; for memory only, if too many saves wait for the durable tier already.

    Waits for room in the queue. The last save of a training, or of a preempted job, neither waits nor is skipped: no
    save follows it.

    If a part of this save is held on this node, another rank has decided. ``votes`` are those of the other ranks.
    """
    if not facts.durable:
        return facts
    # Noted even if this save fails: a delete that follows may delete the checkpoint that this save should replace.
    session.followed = facts.save_id
    _give_up(session, {each.given_up for each in votes})
    is_last = session.is_last or session.is_preempted
    decided = [each.part.durable for each in held if each.save_id == facts.save_id]
    has_room = is_last or all(each.free for each in votes)
    if has_room and (is_last or (decided[0] if decided else _is_free(session, besides=facts.save_id))):
        session.known.note(facts.name, exists=True)
        return facts
    session.counts["skipped"] += 1
    session.note("skipped", name=facts.name, step=facts.step, error="too many saves wait for the durable tier")
    session.log.at_step(facts.step).warning("%s stays in memory: too many saves wait for the durable tier", facts.name)
    return dataclasses.replace(facts, durable=False, left_out=True)


def has_missed(session: Session, facts: SaveFacts) -> bool:
    """Returns True if a save fails because too many wait for the durable tier: training is not to continue without."""
    return facts.left_out and session.config.on_save_error == "raise" and not session.is_preempted


@contextlib.contextmanager
def needing_room(session: Session, facts: SaveFacts) -> Iterator[None]:
    """Raises SaveError if the block has no room for a save that is, or was to be, durable; else MemoryFullError."""
    try:
        yield
    except MemoryFullError as full:
        if not facts.durable and not has_missed(session, facts):
            raise
        raise _no_room(facts.name, full, facts.step) from full


def _no_room(what: str, full: MemoryFullError, step: int = -1) -> SaveError:
    text = f"no room for {what}: {full.message}"
    return SaveError(text, operation="save", tier="memory", key=full.key, step=ids.known(step), hint=full.hint)


def warn_spilled(session: Session, size: int) -> None:
    """Logs once that checkpoints go to the spill: a warning, unless the user named the folder."""
    tier, config = session.open().tier, session.config
    if tier.spill is None or "spilled" in session.warned:
        return
    text = (
        f"the memory tier can't hold this checkpoint of {size_text(size)} in {config.memory_dir}, so it goes through "
        f"{tier.spill.root} on the node's disk, which may take {size_text(tier.spill.room())} more"
    )
    if config.spill_dir == AUTO:
        session.warn("spilled", f"{text}, and leaves half of what is free to others; see spill_dir")
    else:
        session.warned.add("spilled")
        session.log.info("%s", text)


def say_eager(session: Session, why: str) -> None:
    """Logs once, if overlapped captures are asked for, why a save is not overlapped."""
    staging = session.config.staging
    if staging != "eager" and f"staging: {why}" not in session.warned:
        session.warned.add(f"staging: {why}")
        session.log.info("staging is %s, but the state is captured before a save returns: %s", staging, why)


def skip(session: Session, facts: SaveFacts, reason: Exception) -> None:
    """Counts a memory-only save for which there is no room, with one warning."""
    if not facts.left_out:
        # Otherwise it was counted when it was left out of the durable tier.
        session.counts["skipped"] += 1
        session.note("skipped", name=facts.name, step=facts.step, error=str(reason))
    session.log.at_step(facts.step).debug("%s is skipped: %s", facts.name, reason)
    session.warn(
        "skipped", f"the memory tier can't hold this checkpoint, so steps of memory alone are skipped: {reason}"
    )


def warn_at_first_save(session: Session, name: str, content: Any) -> None:
    """Warns, once for each session, if the configuration does not allow the saved objects.

    The content is an :class:`Image`, or the bytes of files that ``torch.save`` wrote.
    """
    if "trust" in session.warned:
        return
    session.warned.add("trust")
    trust, log = Trust.of(session.config), session.log
    try:
        lacking = [] if trust.is_full else trust.lacking_in(content)
    except ConfigError as error:
        log.warning("%s: the configuration would refuse to load it: %s", name, error)
    except Exception as error:
        # Files of torch.save can be read; this look decides nothing, so its error is only logged.
        log.debug("%s: could not look at what it holds: %s", name, error)
    else:
        if lacking:
            log.warning("%s: the configuration would refuse to load it: %s", name, trust.advice(lacking))


@contextlib.contextmanager
def last_saves(session: Session) -> Iterator[None]:
    """Marks saves within the block as the last ones of a training."""
    session.is_last = True
    try:
        yield
    finally:
        session.is_last = False


def _is_free(session: Session, *, besides: str = "") -> bool:
    """Waits for room in this node's queue; returns True if the queue can take one more save."""
    drain = session.open().drain
    try:
        drain.start()
    except MemoryFullError as full:
        raise _no_room("the queue for the durable tier", full) from full
    return drain.has_room(session.save_ids.next(), besides=besides)


def _give_up(session: Session, save_ids: Collection[str]) -> None:
    """Cancels saves that can't become complete any more, as another node has given up its part."""
    drain = session.open().drain
    for each in sorted({*save_ids} & {*drain.pending_saves()}):
        drain.cancel(session.save_ids.next(), each)
