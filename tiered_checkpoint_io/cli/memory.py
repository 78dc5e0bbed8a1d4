"""Commands over the memory tier: run a drain, look at what lies in memory, delete it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.documents import Status, drain_document, latest_saves, namespace_document
from tiered_checkpoint_io.cli.metrics import Export, source_of, targets_of
from tiered_checkpoint_io.cli.options import NODE, NODES, Json, Node, Nodes
from tiered_checkpoint_io.cli.output import INTERRUPTED, is_terminal, printable, say, show, write_json
from tiered_checkpoint_io.cli.rows import part_text
from tiered_checkpoint_io.engine.drain import standalone
from tiered_checkpoint_io.engine.drain.ending import ended_by_signal
from tiered_checkpoint_io.engine.drain.locks import is_locked
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, Drain
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.inventory.node import HeldPart, held_part
from tiered_checkpoint_io.inventory.roots import existing, owned, tier_at, undone
from tiered_checkpoint_io.logs import get_logger, size_text
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.metrics.exports import Exports
from tiered_checkpoint_io.model.place import Place

_SHOWN_OUTCOMES = 10
_COLUMNS = ("name", "step", "rank", "size", "state", "replicated", "note", "dirpath")


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
        write_json("drain", drain_document(root, before, left))
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
        write_json("status", Status([namespace_document(each) for each in roots]))
        return
    for number, each in enumerate(roots):
        if number:
            say("")
        _show_namespace(each)


def _show_namespace(root: Path) -> None:
    tier, queue = tier_at(root), Queue(root)
    own, kept = tier.parts(), tier.replicas.parts()
    waiting = queue.look(tier)
    places = {each.part.place for each in (*own, *kept)} | {each.place for each in waiting if each.dirpath}
    say(f"namespace: {root.name}, in {printable(str(root.parent))}")
    places |= {tier.place} if tier.place is not None else set()
    # The server where it tells two apart.
    dirpaths = [place.dirpath for place in places]
    named = {place: str(place) if dirpaths.count(place.dirpath) > 1 else place.dirpath for place in places}
    for name in sorted(named.values()):
        say(f"dirpath: {printable(name)}")
    # On a terminal there is little room, and it has just been said.
    shown = 7 if is_terminal() and len(places) == 1 else 8
    latest = latest_saves([*own, *kept])
    known = queue.outcomes()
    rows = [_row(each, _state(held_part(tier, each, known)), latest, named) for each in reversed(own)]
    rows += [(str(folder), "", "", "", f"damaged: {error}", "", "", "") for folder, error in tier.damaged()]
    show("Checkpoints in memory", [row[:shown] for row in rows], *_COLUMNS[:shown])
    copies = [_row(each, "replica", latest, named) for each in reversed(kept)]
    copies += [(str(folder), "", "", "", f"damaged: {error}", "", "", "") for folder, error in tier.replicas.damaged()]
    if copies:
        say("Copies kept for other nodes:")
        show("", [row[:shown] for row in copies], *_COLUMNS[:shown])
    if waiting:
        pending = [(each.action, each.name, each.target, named.get(each.place, "")) for each in waiting]
        say("Operations that wait for the durable tier:")
        show("", pending, "operation", "name", "target", "dirpath")
    outcomes = [
        (each.action, each.name, each.state, size_text(each.bytes) if each.bytes else "", each.error)
        for each in reversed(known[-_SHOWN_OUTCOMES:])
    ]
    if outcomes:
        say("Last operations on the durable tier:")
        show("", outcomes, "operation", "name", "outcome", "size", "error")
    progress = queue.progress()
    age = time.time() - progress.heartbeat
    seen = f"process {progress.pid}, last seen {age:.0f} s ago" if progress.pid else "has not run"
    work = (
        f", {progress.name} {size_text(progress.bytes_done)} of {size_text(progress.bytes_total)}"
        if progress.name
        else ""
    )
    say(printable(f"drain: {seen}, {len(waiting)} pending{work}"))
    if progress.last_error:
        say(printable(f"last error: {progress.last_error}"))


def _row(stored: StoredPart, state: str, latest: set[str], named: Mapping[Place, str]) -> tuple[str, ...]:
    part, content = stored.part, stored.part.content
    # Of a save of several ranks, only all parts together are safe.
    safe = "yes" if stored.replicated else "no"
    step = str(content.step) if content.step >= 0 else ""
    note = "latest" if stored.save_id in latest else "" if content.resumable else "not resumable"
    return part.name, step, str(part.rank), size_text(content.size), state, safe, note, named[part.place]


def _state(held: HeldPart) -> str:
    state = part_text(held.state)
    return f"{state} (on disk)" if held.tier == "spill" else state
