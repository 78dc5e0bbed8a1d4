"""Commands over the memory tier: run a drain, look at what lies in memory, delete it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.documents import Damaged, Drained, DrainState, Namespace, Outcome, Status, Waiting
from tiered_checkpoint_io.cli.listing import part_text
from tiered_checkpoint_io.cli.metrics import Export, source_of, targets_of
from tiered_checkpoint_io.cli.options import NODE, NODES, Json, Node, Nodes
from tiered_checkpoint_io.cli.output import INTERRUPTED, is_terminal, printable, say, show, write_json
from tiered_checkpoint_io.engine.drain import operations, standalone
from tiered_checkpoint_io.engine.drain.ending import ended_by_signal
from tiered_checkpoint_io.engine.drain.locks import is_locked
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, Drain
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.inventory.details import PartHere, parts_here
from tiered_checkpoint_io.inventory.node import held_part, tier_of
from tiered_checkpoint_io.inventory.record import time_of
from tiered_checkpoint_io.inventory.roots import existing, owned, tier_at, undone
from tiered_checkpoint_io.logs import get_logger, size_text
from tiered_checkpoint_io.metrics.exports import Exports
from tiered_checkpoint_io.model import ids

_SHOWN_OUTCOMES = 10
_COLUMNS = ("name", "step", "rank", "size", "state", "replicated", "note", "dirpath")
_Row = tuple[str, ...]


def drain(
    node: Node = NODE,
    once: Annotated[bool, typer.Option(help="End as soon as nothing can be done.")] = False,
    stay: Annotated[bool, typer.Option(help="Wait for work for ever, as a sidecar does.")] = False,
    export: Export = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print what was done, for programs.")] = False,
) -> None:
    """Moves checkpoints from node memory to the durable tier."""
    if as_json and not once:
        raise typer.BadParameter("--json needs --once: it prints what was done")
    root = owned(existing(node.path))
    log, targets, source, exports = get_logger(root.name), targets_of(export), source_of(root), Exports()
    # One that stays is ended while it waits for work: that is no failure of what it did before.
    ends, before = once or not stay, set(Queue(root).outcomes())
    with ended_by_signal(log, late=int(ends)) as stop, contextlib.closing(exports):
        for target in targets:
            exports.start(target, source, log)
        worker = Drain(root, logger=log, stop=stop, stay=stay)
        standalone.run(worker, root, log, stop, once=once, stay=stay)
    left = undone(root) if ends else 0
    failed = [each for each in Queue(root).outcomes() if each not in before and each.state == "failed"] if ends else []
    if as_json:
        write_json("drain", _drain_document(root, before, left))
    if stop.is_interrupt:
        raise typer.Exit(INTERRUPTED)
    if left:
        progress = Queue(root).progress()
        hint = f"last error: {progress.last_error or 'none'}"
        if is_locked(root / LOCK_FILE):
            other = f", process {progress.pid}" if progress.pid else ""
            hint = f"another drain works on this namespace{other}: tiered-ckpt flush waits for it; {hint}"
        text = f"{left} {'operation is' if left == 1 else 'operations are'} not done"
        raise DrainError(text, operation="drain", tier="durable", key=str(root), hint=hint)
    if failed:
        text = f"{failed[0].action} of {failed[0].name} failed: {failed[0].error}"
        hint = f"it is not tried again; all that failed ({len(failed)}): tiered-ckpt status"
        raise DrainError(text, operation="drain", tier="durable", key=str(root), hint=hint)


def status(
    nodes: Nodes = NODES,
    as_json: Json = False,
) -> None:
    """Shows what lies in this node's memory, and what waits for the durable tier. Asks no server.

    "latest" marks the checkpoint that tiered:latest would take of what this node has in memory: the latest save (not
    the greatest step) that training can resume from, and that is complete here or with replicas on other nodes.
    """
    roots = nodes.paths()
    if not roots:
        say(f"no namespace of this user has a memory tier in {printable(nodes.memory_dir)}", err=True)
    if as_json:
        write_json("status", Status([_namespace_document(each) for each in roots]))
        return
    for number, each in enumerate(roots):
        if number:
            say("")
        _show_namespace(_namespace_document(each))


def _drain_document(root: Path, before: Collection[operations.Outcome], left: int) -> Drained:
    """What a drain has done since there were the outcomes ``before``, and how many operations are left."""
    return Drained(root, left, [_outcome(each) for each in Queue(root).outcomes() if each not in before])


def _namespace_document(root: Path) -> Namespace:
    """What lies in the memory of one namespace, what waits, and what the drain says of itself."""
    tier, queue = tier_at(root), Queue(root)
    outcomes, progress = queue.outcomes(), queue.progress()
    return Namespace(
        namespace=root.name,
        root=root,
        dirpath=tier.place.dirpath if tier.place is not None else None,
        server=(tier.place.endpoint or None) if tier.place is not None else None,
        parts=parts_here([held_part(tier, each, outcomes) for each in tier.held()]),
        damaged=[Damaged(folder, tier_of(tier, folder), str(error)) for folder, error in tier.unreadable()],
        waiting=[
            Waiting(each.action, each.name, each.target or None, each.dirpath, each.place.endpoint or None)
            for each in queue.look(tier)
        ],
        outcomes=[_outcome(each) for each in outcomes],
        drain=DrainState(
            pid=progress.pid or None,
            last_seen=time_of(progress.heartbeat) if progress.pid else None,
            name=progress.name or None,
            done_bytes=progress.bytes_done,
            total_bytes=progress.bytes_total,
            rate_bytes_per_s=progress.rate,
            last_error=progress.last_error or None,
        ),
    )


def _outcome(each: operations.Outcome) -> Outcome:
    return Outcome(
        action=each.action,
        name=each.name,
        dirpath=each.dirpath,
        step=ids.known(each.step),
        outcome=each.state,
        error=each.error or None,
        size_bytes=each.bytes,
        duration_s=each.seconds,
        finished=time_of(each.finished),
        attempts=each.attempts,
    )


def _show_namespace(found: Namespace) -> None:
    tiers = {(each.dirpath, each.server) for each in found.waiting if each.dirpath}
    tiers |= {(each.dirpath, each.server) for each in found.parts}
    tiers |= {(found.dirpath, found.server)} if found.dirpath is not None else set()
    say(f"namespace: {found.namespace}, in {printable(str(found.root.parent))}")
    # The server where it tells two apart.
    dirpaths = [dirpath for dirpath, _ in tiers]
    named = {each: " at ".join(filter(None, each if dirpaths.count(each[0]) > 1 else each[:1])) for each in tiers}
    for name in sorted(named.values()):
        say(f"dirpath: {printable(name)}")
    # On a terminal there is little room, and it has just been said.
    shown = 7 if is_terminal() and len(tiers) == 1 else 8
    own, copies = _rows(found, named, replicas=False), _rows(found, named, replicas=True)
    show("Checkpoints in memory", [row[:shown] for row in own], *_COLUMNS[:shown])
    if copies:
        say("Copies kept for other nodes:")
        show("", [row[:shown] for row in copies], *_COLUMNS[:shown])
    if found.waiting:
        say("Operations that wait for the durable tier:")
        pending = [
            (each.action, each.name, each.target or "", named.get((each.dirpath, each.server), ""))
            for each in found.waiting
        ]
        show("", pending, "operation", "name", "target", "dirpath")
    if found.outcomes:
        say("Last operations on the durable tier:")
        outcomes = [
            (
                each.action,
                each.name,
                each.outcome,
                size_text(each.size_bytes) if each.size_bytes else "",
                each.error or "",
            )
            for each in reversed(found.outcomes[-_SHOWN_OUTCOMES:])
        ]
        show("", outcomes, "operation", "name", "outcome", "size", "error")
    drain, seen, work = found.drain, "has not run", ""
    if drain.last_seen is not None:
        age = datetime.now(timezone.utc) - drain.last_seen
        seen = f"process {drain.pid}, last seen {age.total_seconds():.0f} s ago"
    if drain.name is not None:
        work = f", {drain.name} {size_text(drain.done_bytes)} of {size_text(drain.total_bytes)}"
    say(printable(f"drain: {seen}, {len(found.waiting)} pending{work}"))
    if drain.last_error is not None:
        say(printable(f"last error: {drain.last_error}"))


def _rows(found: Namespace, named: Mapping[tuple[str, str | None], str], *, replicas: bool) -> list[_Row]:
    """The own parts, or the replicas, the newest first, and those of them that can't be read."""
    parts = [each for each in reversed(found.parts) if (each.tier == "replicas") is replicas]
    broken = [each for each in found.damaged if (each.tier == "replicas") is replicas]
    return [
        *(_row(each, named[each.dirpath, each.server]) for each in parts),
        *((str(each.folder), "", "", "", f"damaged: {each.error}", "", "", "") for each in broken),
    ]


def _row(part: PartHere, dirpath: str) -> _Row:
    state = "replica" if part.tier == "replicas" else part_text(part.state)
    # Of a save of several ranks, only all parts together are safe.
    safe = "yes" if part.is_replicated else "no"
    step = str(part.step) if part.step is not None else ""
    note = "latest" if part.is_latest else "" if part.resumable else "not resumable"
    disk = " (on disk)" if part.tier == "spill" else ""
    return part.name, step, str(part.rank), size_text(part.size_bytes), f"{state}{disk}", safe, note, dirpath
