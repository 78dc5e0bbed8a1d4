"""The commands on this node's memory: one uploads checkpoints that only it has, one deletes its checkpoints."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tiered_checkpoint_io.cli.answers import ask, claimed
from tiered_checkpoint_io.cli.listing import columns_of
from tiered_checkpoint_io.cli.options import Name, Node, Output
from tiered_checkpoint_io.cli.output import INTERRUPTED, say, show, write_json
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.operations import DAMAGED_IN_MEMORY
from tiered_checkpoint_io.engine.drain.process import ended_by_signal, run
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE, last_config, tier_at
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.engine.durable.files import read_if_there
from tiered_checkpoint_io.engine.durable.lease import holder_of
from tiered_checkpoint_io.engine.leasing import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.engine.leasing import delete, left_by, lock_out
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DrainError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.inventory.node import (
    HeldSave,
    Namespace,
    Unit,
    by_payload,
    existing,
    has_trainer,
    held_part,
    look_at,
    owned,
    places_of,
    to_flush,
    undone,
)
from tiered_checkpoint_io.inventory.rows import CheckpointInfo, Look, read, read_all
from tiered_checkpoint_io.logs import get_logger, size_text
from tiered_checkpoint_io.memory.node import is_locked, release, try_lock, write_atomic
from tiered_checkpoint_io.memory.parts import mark_durable
from tiered_checkpoint_io.memory.tier import AUTO, FOLDERS, MemoryTier, spill_dir_of
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.stores import Store, config_at

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Flush(Output, Node):
    """Uploads checkpoints that only this node's memory has: before the node goes, or as a sidecar by --stay.

    Uploads the newest resumable checkpoint of each payload (full, sharded, local) and everything queued, whether the
    trainer is alive or not. If the newest is damaged, also uploads the one before and exits with 1. Other checkpoints
    of the same step, such as those of other process groups, go with it. The running drain does the upload, or
    a new one, which continues if this command is interrupted. If the parts of a checkpoint are on several nodes, run
    this on each of them. Refused while a run of another job writes to the same dirpath.
    """

    name: Name = None
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints in this node's memory.")] = False
    stay: Annotated[
        bool, typer.Option("--stay", help="Upload what is queued, and wait for more for ever, as a sidecar.")
    ] = False
    ended: Annotated[
        bool, typer.Option("--ended", help="Skip a namespace that a live trainer uses: for a job's epilog.")
    ] = False
    timeout: Annotated[int, typer.Option(min=1, max=24 * 3600, metavar="SECONDS", help="Time for all uploads.")] = 600

    def run(self) -> None:
        """Uploads, and prints a row for each checkpoint; the status is 1 if one is not durable."""
        if self.everything and self.name is not None:
            raise typer.BadParameter("give a name, or --all")
        if self.stay and (self.everything or self.ended or self.as_json or self.name is not None):
            raise typer.BadParameter("--stay takes only --memory-dir and --namespace")
        root = owned(existing(self.root))
        if self.stay:
            _stay(root)
            return
        if self.ended and has_trainer(root):
            if self.as_json:
                write_json("flush", {"namespace": root.name, "flushed": False, "checkpoints": (), "errors": ()})
            else:
                say(f"{root.name}: left to its trainer, which is alive")
            return
        # tiered:latest is the default.
        done = _Flush(root, name=None if self.name == ids.LATEST else self.name, everything=self.everything)
        done.run(self.timeout)
        if self.as_json:
            document = {"flushed": done.is_good, "checkpoints": done.rows, "errors": done.failures}
            write_json("flush", {"namespace": root.name, **document})
        else:
            show(done.rows, columns_of(done.rows, with_dirpath=True))
            for line in done.failures:
                say(f"error: {line}", err=True)
        if done.error is not None:
            raise done.error
        raise typer.Exit(0 if done.is_good else 1)


def _stay(root: Path) -> None:
    """Uploads the queue until a signal ends this; waits while another drain works."""
    log = get_logger(root.name)
    # One that is ended while it waits for work has not failed.
    with ended_by_signal(log, late=0) as stop:
        run(Drain(root, logger=log, stop=stop, stay=True), root, log, stop, stay=True)
    if stop.is_interrupt:
        raise typer.Exit(INTERRUPTED)


class _Flush:
    """One flush of a namespace."""

    def __init__(self, root: Path, *, name: str | None, everything: bool) -> None:
        """Chooses the saves; raises CheckpointNotFoundError if there is none, and the queue is empty."""
        self._root, self._tier, self._queue = root, tier_at(root), Queue(root)
        self._is_choice = name is None and not everything
        self._saves = to_flush(self._tier.parts(), name=name, everything=everything)
        queued = self._queue.look(self._tier)
        if not self._saves and (name is not None or not queued):
            text = "no checkpoint that training can resume from" if name is None else f"no such checkpoint: {name}"
            hint = "see what is there: tiered-ckpt status"
            raise CheckpointNotFoundError(text, operation="flush", tier="memory", key=str(root), hint=hint)
        self._config = _config(root, self._saves[0].place if self._saves else queued[0].place)
        self._before = set(self._queue.outcomes())
        #: The state of each save.
        self.rows = list[CheckpointInfo]()
        #: Errors of operations that failed meanwhile.
        self.failures = list[str]()
        #: The reason why not all is uploaded.
        self.error: DrainError | None = None
        #: True if all is uploaded that had to be.
        self.is_good = False

    def run(self, timeout: float) -> None:
        """Uploads the saves and the queue; ``timeout`` is for all of it."""
        began, tried = SYSTEM.monotonic(), list[HeldSave]()
        lost: set[Unit] = set()
        with contextlib.ExitStack() as held:
            for place in sorted({save.place for save in self._saves}, key=str):
                if self._is_another_jobs(place):
                    held.enter_context(claimed(config_at(self._config, place), threading.Event(), place.dirpath))
            saves = self._saves
            # The queue is uploaded too, if no save is chosen.
            while saves or not tried:
                self._mark(saves)
                self.error = _upload(self._tier, self._config, max(1.0, timeout - (SYSTEM.monotonic() - began)))
                tried += saves
                # The drain has found that its bytes in memory differ from the saved ones, and put it into quarantine.
                ended = {each.op_id for each in self._queue.outcomes() if each.error_type == DAMAGED_IN_MEMORY}
                damaged = {save.unit for save in saves if any(each.op_id in ended for each in save.parts)}
                lost |= damaged
                if self.error is not None or not damaged or not self._is_choice:
                    break
                known = {save.content.save_id for save in tried}
                saves = [s for s in to_flush(self._tier.parts(), without=lost) if s.content.save_id not in known]
        self.rows = self._rows(tried)
        # An operation that is still queued is tried again.
        queued = {each.op_id for each in self._queue.look(self._tier)}
        last = {each.op_id: each for each in self._queue.outcomes() if each not in self._before}
        failed = [each for each in last.values() if each.state == "failed" and each.op_id not in queued]
        self.failures = [f"{each.action} of {each.name} failed: {each.error}" for each in failed]
        # An incomplete one was sent; other nodes send the rest.
        there = {row.save_id for row in self.rows if row.state in ("durable", "incomplete")}
        groups = by_payload(tried) or ([tried] if tried else [])
        is_there = all(any(save.content.save_id in there for save in group) for group in groups)
        self.is_good = self.error is None and not lost and not failed and is_there

    def _ask(self, place: Place, work: Callable[[Store], _T]) -> _T:
        return ask(config_at(self._config, place), work, place.dirpath)

    def _is_another_jobs(self, place: Place) -> bool:
        """Returns True if a job other than this memory's has the lease of a durable tier.

        A run of the same job is no obstacle: this is one more drain of its checkpoints.
        """
        try:
            holder = self._ask(place, holder_of)
        except TieredCheckpointError:
            # The upload meets the same, and says so for each checkpoint.
            return False
        return holder is not None and holder.namespace != self._root.name

    def _mark(self, saves: Sequence[HeldSave]) -> None:
        """Makes the drain upload the parts that it would leave in memory."""
        known = self._queue.outcomes()
        for save in saves:
            states = {held_part(self._tier, each, known).state for each in save.parts}
            is_gone = False
            if "durable" in states <= {"durable", "sent"}:
                # A durable tier that can't be asked is reported at the end.
                with contextlib.suppress(TieredCheckpointError):
                    is_gone = self._ask(save.place, partial(read_if_there, name=save.name)) is None
            for stored in save.parts:
                outcome = self._queue.outcome(stored.op_id)
                is_given_up = stored.drained and outcome is not None and outcome.state == "skipped"
                if not stored.part.durable or is_given_up or is_gone:
                    # One that retention removes right now is not there any more: said at the end.
                    with contextlib.suppress(CheckpointNotFoundError):
                        mark_durable(stored)
        self._queue.ring()

    def _rows(self, saves: Sequence[HeldSave]) -> list[CheckpointInfo]:
        """Returns a row for each save, as a look at both tiers finds it; after an error, only at memory."""
        node, wanted = [look_at(self._root)], {save.content.save_id for save in saves}

        def rows_at(place: Place) -> list[CheckpointInfo]:
            names = sorted({save.name for save in saves if save.place == place})
            found = None
            if self.error is None:
                found = self._ask(place, lambda store: [read(store, name) for name in names])
            return Look(place, node, found).checkpoints

        places = sorted({save.place for save in saves}, key=str)
        return [row for place in places for row in rows_at(place) if row.save_id in wanted]


def _config(root: Path, place: Place) -> TieredCheckpointConfig:
    """Returns the last trainer's configuration; if there is none, makes and notes one for a drain."""
    config = last_config(root)
    if config is None:
        # Steps of memory alone start no drain.
        keys = {"dirpath": place.dirpath, "memory_dir": str(root.parent.parent), "namespace": root.name}
        config = config_at(TieredCheckpointConfig.from_any(keys), place)
        config = replace(config, spill_dir=spill_dir_of(config.spill_dir))
        write_atomic(root / CONFIG_FILE, config.to_json().encode())
    return config


def _upload(tier: MemoryTier, config: TieredCheckpointConfig, timeout: float) -> DrainError | None:
    """Waits until all that is queued by now is uploaded, by a drain of its own if none runs; why it was not.

    Saves that a trainer makes meanwhile are not waited for: these may never end.
    """
    # A thread of this process would end with it.
    handle = DrainHandle(tier, config.with_support(drain="process"), get_logger(tier.root.name))
    try:
        handle.flush(timeout, only={each.op_id for each in handle.queue.look(tier)})
    except DrainError as error:
        return error
    finally:
        handle.close(timeout_s=0)
        # The drain writes an outcome before it moves what is damaged, and holds its lock until it leaves.
        deadline, job = SYSTEM.monotonic() + SYSTEM.timing.namespace_wait_s, tier.root / JOB_FILE
        while handle.is_running and SYSTEM.monotonic() < deadline and not (job.exists() and is_locked(job)):
            SYSTEM.sleep(SYSTEM.timing.namespace_poll_s)
    return None


# ---------------------------------------------------------------------------------------- clean
_USED = "a trainer or drain uses it"


@dataclass(frozen=True, kw_only=True)
class Clean(Output, Node):
    """Deletes a namespace's checkpoints from node memory, and from its spill.

    Without --yes it only shows what would go, and warns of what would be lost: uploads that are pending, parts that
    can't be read, and a newest checkpoint that the durable tier does not have. Then the exit status is 1. Refused while
    a trainer uses the memory, or a drain works on it; a drain that has nothing to do is ended.
    """

    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would go.")] = False

    def run(self) -> None:
        """Shows the files that would go, or deletes them; the status is 1 if there is a warning."""
        root = self.root
        with contextlib.ExitStack() as held:
            left = _left_over(root, held)
            # A folder that an earlier command has put away, and not deleted yet, names the spill as well.
            config = next(filter(None, map(last_config, [root, *left])), None)
            memory = MemoryTier(root)
            memory.use_spill(config.spill_dir if config is not None else AUTO)
            spills = [memory.spill] if memory.spill is not None else []
            folders = [*([root] if root.is_dir() else []), *(each.root for each in spills)]
            if root.is_dir():
                if not any((root / folder).is_dir() for folder in FOLDERS):
                    hint = "check --memory-dir and --namespace"
                    raise ConfigError(f"{root} is no memory tier, and was left as it is", hint=hint)
                owned(root)
            is_used, found = _is_used(root, held), None
            # An earlier command may have been killed half-way.
            with contextlib.suppress(FileNotFoundError):
                found = look_at(root) if root.is_dir() else None
            warnings = _warnings(config, found, is_used=is_used) if found is not None and not self.yes else []
            if self.yes:
                if is_used:
                    raise ConfigError(f"{root} was left as it is: {_USED}", hint="end it first")
                delete(root, [each.root for each in spills], SYSTEM)
                for folder in left:
                    shutil.rmtree(folder, ignore_errors=True)
        if self.yes:
            with contextlib.suppress(OSError):
                root.parent.rmdir()
        rows = [row for place in places_of([found]) for row in Look(place, [found]).checkpoints] if found else []
        if self.as_json:
            document = {"root": root, "dry_run": not self.yes, "warnings": warnings, "checkpoints": rows}
            write_json("clean", document)
        elif not folders:
            say(f"nothing in memory at {root}, and no spill of it is known")
        else:
            show(rows, columns_of(rows))
            for warning in warnings:
                say(f"warning: {warning}", err=True)
            parts, unread = (found.parts, found.damaged) if found is not None else ([], [])
            size = size_text(sum(each.size_bytes for each in parts))
            what = f"{_count(len(parts) + len(unread), 'part')}, {size}, and {', '.join(map(str, folders))}"
            say(f"removed {what}" if self.yes else f"{what} would go; delete with --yes")
        raise typer.Exit(1 if warnings else 0)


def _is_used(root: Path, held: contextlib.ExitStack) -> bool:
    """Locks out trainers and drains until ``held`` ends; returns whether one of them was there before."""
    deadline = SYSTEM.monotonic() + SYSTEM.timing.namespace_wait_s
    while root.is_dir():
        with contextlib.ExitStack() as tried:
            busy = lock_out(root, tried)
            # An idle drain is no reason to keep a memory.
            is_used = bool(busy - {LOCK_FILE}) or (bool(busy) and undone(root) > 0)
            if not is_used or SYSTEM.monotonic() > deadline:
                held.push(tried.pop_all())
                return is_used
        # A drain that is about to leave looks for trainers by their lock.
        SYSTEM.sleep(SYSTEM.timing.namespace_poll_s)
    return False


def _left_over(root: Path, held: contextlib.ExitStack) -> list[Path]:
    """Returns folders that killed commands have put away, locked until ``held`` ends."""
    found: list[Path] = []
    for left in sorted(root.parent.iterdir()) if root.parent.is_dir() else ():
        # One that is locked is another command's, which may put it back.
        if left.name.startswith(left_by(root)) and (lock := try_lock(left / TRAINERS_FILE)) is not None:
            held.callback(release, lock)
            found.append(left)
    return found


def _warnings(config: TieredCheckpointConfig | None, found: Namespace, *, is_used: bool) -> list[str]:
    """Returns reasons not to delete the parts."""
    pending = len(found.waiting)
    warnings = [
        f"{_USED}, so nothing can be deleted" if is_used else "",
        f"{_count(pending, 'operation')} not yet durable: upload first, by tiered-ckpt flush" if pending else "",
        *(f"a part can't be read: {each.why}" for each in found.damaged[:1]),
        *(_nowhere_else(config, place, found) for place in sorted({each.place for each in found.parts}, key=str)),
    ]
    return list(filter(None, warnings))


def _nowhere_else(config: TieredCheckpointConfig | None, place: Place, found: Namespace) -> str:
    """Returns why the newest checkpoint of a payload, or another of its step, must stay in memory; else "".

    Replicas on other nodes are in memory too, and may be cleaned at the same time: they do not count.
    """
    here = _newest(Look(place, [found]).checkpoints)
    if not here:
        return ""
    try:
        there = config_at(config or TieredCheckpointConfig.from_any(dirpath=place.dirpath), place)
        lost = _newest(Look(place, [found], ask(there, read_all, place.dirpath)).checkpoints)
    except TieredCheckpointError as error:
        return f"could not check whether its newest checkpoint {_named(here[0])} is on the durable tier too: {error}"
    lost = [each for each in lost if "durable" not in each.where]
    return f"its newest checkpoint {_named(lost[0])} is not on the durable tier {place.dirpath}" if lost else ""


def _newest(rows: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Returns the newest checkpoint of each payload that training can resume from, and the others of its step."""
    newest: dict[str | None, CheckpointInfo] = {}
    return [
        each
        for each in rows
        if each.resumable and not each.alias_of
        for last in [newest.setdefault(each.kind, each)]
        if each is last or each.step == last.step is not None
    ]


def _named(each: CheckpointInfo) -> str:
    return f"{each.name} (step {each.step})" if each.step is not None else each.name


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
