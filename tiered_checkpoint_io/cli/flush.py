"""The command that uploads checkpoints that only node memory has: once, or for ever as a sidecar."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tiered_checkpoint_io.cli.answers import ask, claimed
from tiered_checkpoint_io.cli.options import Name, Node, Output
from tiered_checkpoint_io.cli.output import INTERRUPTED, Columns, say, show, write_json
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.operations import DAMAGED_IN_MEMORY
from tiered_checkpoint_io.engine.drain.process import ended_by_signal, run
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE, last_config, tier_at
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.engine.durable.files import read_if_there
from tiered_checkpoint_io.engine.durable.lease import holder_of
from tiered_checkpoint_io.engine.leasing import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    DrainError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.inventory.node import (
    HeldSave,
    Unit,
    by_payload,
    existing,
    has_trainer,
    held_part,
    owned,
    to_flush,
)
from tiered_checkpoint_io.logs import get_logger
from tiered_checkpoint_io.memory.node import is_locked, write_atomic
from tiered_checkpoint_io.memory.parts import mark_durable
from tiered_checkpoint_io.memory.tier import MemoryTier, spill_dir_of
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores import Store, config_at

#: So many ranks are named in a line.
_NAMED = 16

FlushState = Literal["durable", "uploaded", "queued", "not_durable"]


@dataclass(frozen=True, slots=True)
class FlushedSave:
    """The state of a save after a flush.

    Attributes:
        name: The checkpoint.
        dirpath: Its durable tier.
        step: The training step; None if it is not known.
        state: ``uploaded``: this node has sent its parts; the parts of other nodes are missing.
        ranks: Ranks whose parts this node has.
        missing_ranks: Ranks whose parts other nodes have.
        size_bytes: Bytes of the parts that this node has.
        error: The reason if it is not durable.
    """

    name: str
    dirpath: str
    step: int | None
    state: FlushState
    ranks: Sequence[int]
    missing_ranks: Sequence[int]
    size_bytes: int
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Flush(Output, Node):
    """Uploads checkpoints that only this node's memory has: before the node goes, or as a sidecar by --stay.

    Uploads the newest resumable checkpoint of each payload (full, sharded, local) and everything queued, whether the
    trainer is alive or not. If the newest is damaged, also uploads the one before and exits with 1. Averages and the
    checkpoints of other process groups go with the checkpoint of the same step. The running drain does the upload, or
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
            show(done.rows, _COLUMNS)
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
    """One flush of a namespace.

    Attributes:
        rows: The state of each save.
        failures: Errors of other operations that failed meanwhile.
        error: The reason why not all is uploaded.
        is_good: True if all is uploaded that had to be.
    """

    def __init__(self, root: Path, *, name: str | None, everything: bool) -> None:
        """Chooses the saves.

        Raises:
            CheckpointNotFoundError: There is no such save, and the queue is empty.
        """
        self._root, self._tier, self._queue = root, tier_at(root), Queue(root)
        self._is_choice = name is None and not everything
        self._saves = to_flush(self._tier.parts(), name=name, everything=everything)
        queued = self._queue.look(self._tier)
        if not self._saves and (name is not None or not queued):
            text = "no checkpoint that training can resume from" if name is None else f"no such checkpoint: {name}"
            hint = "see what is there: tiered-ckpt status"
            raise CheckpointNotFoundError(text, operation="flush", tier="memory", key=str(root), hint=hint)
        place = self._saves[0].place if self._saves else queued[0].place
        self._config = _config(root, place)
        self._before = set(self._queue.outcomes())
        self.rows, self.failures = list[FlushedSave](), list[str]()
        self.error: DrainError | None = None
        self.is_good = False

    def run(self, timeout: float) -> None:
        """Uploads the saves and the queue; ``timeout`` is for all of it."""
        began, tried = SYSTEM.monotonic(), list[HeldSave]()
        damaged: set[str] = set()
        lost: set[Unit] = set()
        with contextlib.ExitStack() as held:
            for place in sorted({save.place for save in self._saves}, key=str):
                if _is_another_jobs(self._config, place, self._root.name):
                    held.enter_context(claimed(config_at(self._config, place), threading.Event(), place.dirpath))
            saves = self._saves
            while True:
                _mark(self._config, self._tier, self._queue, saves)
                left_s = max(1.0, timeout - (SYSTEM.monotonic() - began))
                self.error = _upload(self._tier, self._config, left_s)
                self.rows += [_row(self._config, self._tier, self._queue, save) for save in saves]
                tried += saves
                # The drain has found that its bytes in memory differ from the saved ones.
                ended = {each.op_id for each in self._queue.outcomes() if each.error_type == DAMAGED_IN_MEMORY}
                found = {save.content.save_id for save in saves if any(each.op_id in ended for each in save.parts)}
                damaged |= found
                lost |= {save.unit for save in saves if save.content.save_id in found}
                if self.error is not None or not found or not self._is_choice:
                    break
                # The damaged one is in quarantine now: another one is the newest.
                known = {save.content.save_id for save in tried}
                saves = [s for s in to_flush(self._tier.parts(), without=lost) if s.content.save_id not in known]
                if not saves:
                    break
        self._judge(tried, damaged)

    def _judge(self, tried: Sequence[HeldSave], damaged: Collection[str]) -> None:
        pairs = zip(tried, self.rows, strict=True)
        there = {save.content.save_id for save, row in pairs if row.state in ("durable", "uploaded")}
        # An operation that is still queued is tried again.
        said = {each.op_id for save in tried for each in save.parts}
        said |= {each.op_id for each in self._queue.look(self._tier)}
        last = {each.op_id: each for each in self._queue.outcomes() if each not in self._before}
        self.failures = [
            f"{each.action} of {each.name} failed: {each.error}"
            for each in last.values()
            if each.state == "failed" and each.op_id not in said
        ]
        groups = by_payload(tried) or ([list(tried)] if tried else [])
        is_there = all(any(save.content.save_id in there for save in group) for group in groups)
        self.is_good = self.error is None and not damaged and not self.failures and is_there


def _config(root: Path, place: Place) -> TieredCheckpointConfig:
    """Returns the last trainer's configuration; if there is none, makes and notes one for a drain.

    Raises:
        MemoryFullError: There is no space to note it.
    """
    config = last_config(root)
    if config is None:
        # Steps of memory alone start no drain.
        keys = {"dirpath": place.dirpath, "memory_dir": str(root.parent.parent), "namespace": root.name}
        config = config_at(TieredCheckpointConfig.from_any(keys), place)
        config = replace(config, spill_dir=spill_dir_of(config.spill_dir))
        write_atomic(root / CONFIG_FILE, config.to_json().encode())
    return config


def _is_another_jobs(config: TieredCheckpointConfig, place: Place, namespace: str) -> bool:
    """Returns True if a job other than this memory's has the lease of a durable tier.

    A run of the same job is no obstacle: this is one more drain of its checkpoints.
    """
    there = config_at(config, place)
    try:
        holder = ask(there, holder_of, place.dirpath)
    except TieredCheckpointError:
        # The upload meets the same, and says so for each checkpoint.
        return False
    return holder is not None and holder.namespace != namespace


def _mark(config: TieredCheckpointConfig, tier: MemoryTier, queue: Queue, saves: Sequence[HeldSave]) -> None:
    """Makes the drain upload the parts that it would leave in memory."""
    for save in saves:
        is_lost = _is_lost(config, tier, queue, save)
        for stored in save.parts:
            outcome = queue.outcome(stored.op_id)
            is_given_up = stored.drained and outcome is not None and outcome.state == "skipped"
            if not stored.part.durable or is_given_up or is_lost:
                # One that retention removes right now is not there any more: said at the end.
                with contextlib.suppress(CheckpointNotFoundError):
                    mark_durable(stored)
    queue.ring()


def _is_lost(config: TieredCheckpointConfig, tier: MemoryTier, queue: Queue, save: HeldSave) -> bool:
    """Returns True if this node committed a save that was deleted, for example because the bucket was emptied."""
    known = queue.outcomes()
    last = [held_part(tier, each, known).outcome for each in save.parts]
    if not save.commits or any(each is None or each.action == "delete" or each.state != "committed" for each in last):
        return False
    # A durable tier that can't be asked is reported at the end.
    with contextlib.suppress(TieredCheckpointError):
        return _manifest(config, save) is None
    return False


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
        while handle.runner.is_running and SYSTEM.monotonic() < deadline and not (job.exists() and is_locked(job)):
            SYSTEM.sleep(SYSTEM.timing.namespace_poll_s)
    return None


def _row(config: TieredCheckpointConfig, tier: MemoryTier, queue: Queue, save: HeldSave) -> FlushedSave:
    """Returns the outcome of a save."""
    pending = {each.op_id for each in queue.look(tier)}
    outcomes = [queue.outcome(each.op_id) for each in save.parts]
    known = queue.outcomes()
    last = [held_part(tier, each, known).outcome for each in save.parts]
    error = next((each.error for each in outcomes if each is not None and each.state != "committed"), "")
    state: FlushState
    if any(each.op_id in pending for each in save.parts):
        state = "queued"
    elif any(each is not None and each.state != "committed" for each in outcomes):
        state = "not_durable"
    elif any(each is not None and each.action == "delete" for each in last):
        state, error = _asked(config, save, "it was deleted from the durable tier")
    else:
        state, error = _asked(config, save, "it is neither in memory nor on the durable tier any more")
    return FlushedSave(
        name=save.name,
        dirpath=save.place.dirpath,
        step=ids.known(save.content.step),
        state=state,
        ranks=sorted(each.part.rank for each in save.parts),
        missing_ranks=save.missing,
        size_bytes=save.size,
        error=error or None,
    )


def _asked(config: TieredCheckpointConfig, save: HeldSave, why: str) -> tuple[FlushState, str]:
    """Returns the durable tier's answer about a save whose parts here were sent; ``why`` it may not have it."""
    try:
        manifest = _manifest(config, save)
        is_sent = manifest is not None or not save.missing or _has_parts(config, save)
    except TieredCheckpointError as error:
        return "uploaded", f"could not check whether it is committed: {error.message}"
    if manifest is not None and manifest.settled.save_id == save.content.save_id:
        return "durable", ""
    if manifest is not None and manifest.content.save_id == save.content.save_id:
        # The coordinator's drain is just sending its last file.
        return "uploaded", ""
    if manifest is not None:
        return "not_durable", "another save has its name on the durable tier"
    if not is_sent:
        return "not_durable", "its parts are not there any more: another node has deleted it, or the bucket was emptied"
    if save.missing:
        return "uploaded", ""
    return "not_durable", why


def _has_parts(config: TieredCheckpointConfig, save: HeldSave) -> bool:
    """Returns True if the durable tier has the descriptions of all parts of this node."""

    def look(store: Store) -> bool:
        try:
            return all(store.size(ids.description_key(each.save_id, each.part.rank)) for each in save.parts)
        except StoreNotFoundError:
            return False

    return ask(config_at(config, save.place), look, save.place.dirpath)


def _manifest(config: TieredCheckpointConfig, save: HeldSave) -> Manifest | None:
    return ask(config_at(config, save.place), lambda store: read_if_there(store, save.name), save.place.dirpath)


def _note(row: FlushedSave) -> str:
    notes = [row.error] if row.error else []
    missing = row.missing_ranks
    if missing and row.state != "durable":
        ranks = ", ".join(map(str, missing[:_NAMED])) + (" ..." if len(missing) > _NAMED else "")
        notes.append(f"the parts of ranks {ranks} are not on this node: run tiered-ckpt flush on theirs")
    return "; ".join(notes)


_COLUMNS: Columns = {
    "name": "name",
    "step": "step",
    "size": "size_bytes",
    "state": lambda row: row.state.replace("_", " "),
    "dirpath": "dirpath",
    "note": _note,
}
