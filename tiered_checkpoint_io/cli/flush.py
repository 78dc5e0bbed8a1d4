"""The command that uploads what is in node memory alone, because the node is about to go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.claiming import claimed
from tiered_checkpoint_io.cli.documents import Flushed, FlushedSave, FlushState
from tiered_checkpoint_io.cli.options import NODE, Json, Node
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.cli.progress import Meter, progress
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DrainError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.inventory.flushing import HeldSave, Unit, by_payload, to_flush
from tiered_checkpoint_io.inventory.node import held_part
from tiered_checkpoint_io.inventory.roots import existing, has_trainer, owned, tier_at
from tiered_checkpoint_io.logs import get_logger, size_text
from tiered_checkpoint_io.memory.parts import mark_durable
from tiered_checkpoint_io.memory.private import write_atomic
from tiered_checkpoint_io.memory.spill import spill_dir_of
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores import Store, config_at

#: Between two looks at the drain's progress, seconds.
_LOOK_S = 0.2
#: So many ranks are named in a line.
_NAMED = 16


def flush(
    name: Annotated[str | None, typer.Argument(help="One checkpoint, or tiered:latest: the default.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints in this node's memory.")] = False,
    ended: Annotated[
        bool, typer.Option("--ended", help="Leave a namespace alone that a live trainer uses: for a job's epilog.")
    ] = False,
    node: Node = NODE,
    timeout: Annotated[
        int, typer.Option(min=1, max=24 * 3600, help="How long to wait for the uploads in all, seconds.")
    ] = 600,
    json: Json = False,
) -> None:
    """Uploads what is in this node's memory alone: before the node goes, whether the trainer lives or not.

    By default the newest checkpoint that training can resume from, of each payload, and all that is queued; where that
    is damaged in memory, the one before it as well, and the status is 1. With a checkpoint goes what
    lies beside it under its name: averages, and what other process groups saved. The drain uploads it like
    any other: the one that runs, or a new one, which continues where this command is interrupted. Of a checkpoint whose
    parts are on several nodes, run this on each of them: it is committed once all parts are there. Refused while a run
    of another job writes to the same dirpath.
    """
    if everything and name is not None:
        raise typer.BadParameter("give a name, or --all")
    # That is the default.
    name = None if name == ids.LATEST else name
    root = owned(existing(node.path))
    if ended and has_trainer(root):
        if json:
            write_json("flush", Flushed(root.name, False, ()))
        else:
            say(printable(f"{root.name}: left to its trainer, which is alive"))
        return
    tier, queue = tier_at(root), Queue(root)
    saves = to_flush(tier.parts(), name=name, everything=everything)
    if not saves:
        text = "no checkpoint that training can resume from" if name is None else f"no such checkpoint: {name}"
        hint = "see what is there: tiered-ckpt status"
        raise CheckpointNotFoundError(text, operation="flush", tier="memory", key=str(root), hint=hint)
    config = _config(root, saves[0].place)
    with contextlib.ExitStack() as held:
        for place in sorted({save.place for save in saves}, key=str):
            if _is_another_jobs(config, place, root.name):
                held.enter_context(claimed(config_at(config, place), threading.Event(), place.dirpath))
        rows, tried = list[FlushedSave](), list[HeldSave]()
        error: DrainError | None = None
        is_damaged, began = False, SYSTEM.monotonic()
        known: set[str] = set()
        lost: set[Unit] = set()
        while saves and error is None:
            _mark(config, tier, queue, saves)
            error = _upload(tier, config, max(1.0, timeout - (SYSTEM.monotonic() - began)), silent=json)
            rows += [_row(config, tier, queue, save) for save in saves]
            tried += saves
            damaged = {save.content.save_id for save in saves if _is_damaged(queue, save)}
            is_damaged = is_damaged or bool(damaged)
            # What was found damaged is in quarantine now: another one is the newest.
            is_next = damaged and name is None and not everything
            known |= {save.content.save_id for save in saves}
            lost |= {save.unit for save in saves if save.content.save_id in damaged}
            left = to_flush(tier.parts(), without=lost) if is_next else []
            saves = [save for save in left if save.content.save_id not in known]
    pairs = zip(tried, rows, strict=True)
    there = {save.content.save_id for save, row in pairs if row.state in ("durable", "uploaded")}
    good = (
        error is None
        and not is_damaged
        and all(any(save.content.save_id in there for save in group) for group in by_payload(tried) or [tried])
    )
    if json:
        write_json("flush", Flushed(root.name, good, rows))
    else:
        for row in rows:
            say(_line(row))
    if error is not None:
        raise error
    raise typer.Exit(0 if good else 1)


def _config(root: Path, place: Place) -> TieredCheckpointConfig:
    """The last trainer's configuration; of one that uploaded nothing yet, what its checkpoints say, noted for a drain.

    Raises:
        MemoryFullError: There is no space to note it.
    """
    try:
        config = TieredCheckpointConfig.from_json((root / CONFIG_FILE).read_text())
    except (OSError, ConfigError, ValueError):
        made = TieredCheckpointConfig.from_any(
            dirpath=place.dirpath, memory_dir=str(root.parent.parent), namespace=root.name
        )
        config = config_at(made, place)
        config = replace(config, spill_dir=spill_dir_of(config.spill_dir))
        write_atomic(root / CONFIG_FILE, config.to_json().encode())
    return config


def _is_another_jobs(config: TieredCheckpointConfig, place: Place, namespace: str) -> bool:
    """Whether only another job than that of this memory has a lease on a durable tier.

    A run of the same job is no obstacle: beside it, this is one drain more of what it saved.
    """
    there = config_at(config, place)
    try:
        leases = ask(there, lambda store: [each.key for each in store.list(ids.LEASE_PREFIX)], place.dirpath)
    except TieredCheckpointError:
        # The upload meets the same, and says so for each checkpoint.
        return False
    return bool(leases) and not any(key.startswith(ids.lease_prefix(namespace)) for key in leases)


def _mark(config: TieredCheckpointConfig, tier: MemoryTier, queue: Queue, saves: Sequence[HeldSave]) -> None:
    """Has the drain upload the parts that it would leave in memory."""
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
    """Whether this node committed a save, and nothing has its name now: others have emptied the bucket, for one."""
    known = queue.outcomes()
    last = [held_part(tier, each, known).outcome for each in save.parts]
    if not save.commits or any(each is None or each.action == "delete" or each.state != "committed" for each in last):
        return False
    # What can't be asked is said at the end.
    with contextlib.suppress(TieredCheckpointError):
        return _manifest(config, save) is None
    return False


def _upload(tier: MemoryTier, config: TieredCheckpointConfig, timeout: float, *, silent: bool) -> DrainError | None:
    """Waits until all that is queued by now is uploaded, by a drain of its own where none runs; why it was not.

    What a trainer saves meanwhile is not waited for: it may never end.
    """
    # A thread of this process would end with it.
    handle = DrainHandle(tier, config.with_support(drain="process"), get_logger(tier.root.name))
    queued = handle.queue.look(tier)
    waiting = {each.op_id: each.stored.part.content.size for each in queued if each.stored is not None}
    try:
        with progress("upload", sum(waiting.values()), silent=silent) as meter, _followed(handle, tier, waiting, meter):
            handle.flush(timeout, only={each.op_id for each in queued})
    except DrainError as error:
        return error
    finally:
        handle.close(timeout_s=0)
    return None


@contextlib.contextmanager
def _followed(handle: DrainHandle, tier: MemoryTier, waiting: dict[str, int], meter: Meter) -> Iterator[None]:
    """Counts the bytes that the drain has sent while the block runs."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_LOOK_S):
            with contextlib.suppress(OSError):
                left = {each.op_id for each in handle.queue.look(tier)}
                done = sum(size for op_id, size in waiting.items() if op_id not in left)
                meter.at(done + handle.queue.progress().bytes_done)

    thread = threading.Thread(target=follow, name="tiered-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _is_damaged(queue: Queue, save: HeldSave) -> bool:
    """Whether the drain has found that its bytes in memory are not those that were saved."""
    outcomes = [queue.outcome(each.op_id) for each in save.parts]
    return any(each is not None and each.error_type == CorruptCheckpointError.__name__ for each in outcomes)


def _row(config: TieredCheckpointConfig, tier: MemoryTier, queue: Queue, save: HeldSave) -> FlushedSave:
    """What became of a save."""
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
        size_bytes=sum(each.part.content.size for each in save.parts),
        error=error or None,
    )


def _asked(config: TieredCheckpointConfig, save: HeldSave, why: str) -> tuple[FlushState, str]:
    """What the durable tier says of a save of which this node has sent all that it has; ``why`` it may not have it."""
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
    """Whether the durable tier has the descriptions of all parts of this node."""

    def look(store: Store) -> bool:
        try:
            return all(store.size(ids.description_key(each.save_id, each.part.rank)) for each in save.parts)
        except StoreNotFoundError:
            return False

    return ask(config_at(config, save.place), look, save.place.dirpath)


def _manifest(config: TieredCheckpointConfig, save: HeldSave) -> Manifest | None:
    return ask(config_at(config, save.place), lambda store: read_manifest(store, save.name), save.place.dirpath)


def _line(row: FlushedSave) -> str:
    """A row for people."""
    step = f"step {row.step}, " if row.step is not None else ""
    text = f"{row.state.replace('_', ' '):<12}{row.name} ({step}{size_text(row.size_bytes)})"
    text += f" at {row.dirpath}" if row.state == "durable" else ""
    missing = row.missing_ranks
    if missing and row.state != "durable":
        ranks = ", ".join(map(str, missing[:_NAMED])) + (" ..." if len(missing) > _NAMED else "")
        text += f"; not committed yet: the parts of ranks {ranks} are not on this node, run tiered-ckpt flush on theirs"
    return printable(f"{text}: {row.error}" if row.error else text)
