"""The command that shows this node's memory and its queue, for people, for programs, or as metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_checkpoint_io.cli.listing import part_text
from tiered_checkpoint_io.cli.options import NODES, Json, Nodes, path_of
from tiered_checkpoint_io.cli.output import is_terminal, printable, say, show, write_json
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.inventory.node import HeldPart, held_part, tier_at, tier_of, time_of
from tiered_checkpoint_io.inventory.rows import marked
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.metrics import Sample, collect, prometheus_text, write_textfile
from tiered_checkpoint_io.model import ids

_SHOWN_OUTCOMES = 10
_COLUMNS = ("name", "step", "rank", "size", "state", "replicated", "note", "dirpath")
_Row = tuple[str, ...]


def status(
    nodes: Nodes = NODES,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics as Prometheus' text instead: docs/operations.md.")
    ] = False,
    textfile: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="PATH",
            help="With --prometheus: replace this file instead, for node_exporter's textfile collector.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows this node's memory, and the operations that wait for the durable tier. Asks no server.

    "latest" marks the checkpoint that tiered:latest would take of this node's memory: the latest save (not the
    greatest step) that training can resume from, and that is complete here or with replicas on other nodes.
    """
    if as_json and prometheus:
        raise typer.BadParameter("give --json or --prometheus")
    if textfile is not None and not prometheus:
        raise typer.BadParameter("--textfile needs --prometheus")
    roots = nodes.paths()
    if not roots:
        say(f"no namespace of this user has a memory tier in {printable(nodes.memory_dir)}", err=True)
    if prometheus:
        _write_metrics(roots, textfile)
        return
    found = [_look(each) for each in roots]
    if as_json:
        write_json("status", {"namespaces": found})
        return
    for number, each in enumerate(found):
        if number:
            say("")
        _show_namespace(each)


def _write_metrics(roots: list[Path], textfile: Path | None) -> None:
    samples: list[Sample] = []
    for root in roots:
        # Deleted meanwhile, or out of descriptors: the next look tells. A missing series is what alerts see.
        with contextlib.suppress(OSError, TieredCheckpointError):
            samples += collect(root)
    text = prometheus_text(samples)
    if textfile is None:
        say(text.removesuffix("\n"))
        return
    try:
        write_textfile(textfile, text)
    except OSError as error:
        why = f"metrics can't be written to {textfile}: {error.strerror or error}"
        raise ConfigError(why, hint="name a file in a folder that this user may write to") from error


def _look(root: Path) -> dict[str, Any]:
    """Returns the parts, the queue and the last outcomes of one namespace, and the state of its drain."""
    tier, queue = tier_at(root), Queue(root)
    outcomes, progress = queue.outcomes(), queue.progress()
    return {
        "namespace": root.name,
        "root": root,
        "dirpath": tier.place.dirpath if tier.place is not None else None,
        "server": (tier.place.endpoint or None) if tier.place is not None else None,
        "parts": marked([held_part(tier, each, outcomes) for each in tier.held()]),
        "damaged": [
            {"folder": folder, "tier": tier_of(tier, folder), "error": str(error)}
            for folder, error in tier.unreadable()
        ],
        "waiting": [
            {
                "action": each.action,
                "name": each.name,
                "target": each.target or None,
                "dirpath": each.dirpath,
                "server": each.place.endpoint or None,
            }
            for each in queue.look(tier)
        ],
        "outcomes": list(map(_outcome, outcomes)),
        "drain": {
            "pid": progress.pid or None,
            "last_seen": time_of(progress.heartbeat) if progress.pid else None,
            "name": progress.name or None,
            "done_bytes": progress.bytes_done,
            "total_bytes": progress.bytes_total,
            "rate_bytes_per_s": progress.rate,
            "last_error": progress.last_error or None,
        },
    }


def _outcome(each: Outcome) -> dict[str, Any]:
    return {
        "action": each.action,
        "name": each.name,
        "dirpath": each.dirpath,
        "step": ids.known(each.step),
        "outcome": each.state,
        "error": each.error or None,
        "size_bytes": each.bytes,
        "duration_s": each.seconds,
        "finished": time_of(each.finished),
        "attempts": each.attempts,
    }


def _show_namespace(found: Mapping[str, Any]) -> None:
    waiting, outcomes, drain, parts = found["waiting"], found["outcomes"], found["drain"], found["parts"]
    tiers = {(each["dirpath"], each["server"]) for each in waiting if each["dirpath"]}
    tiers |= {(each.dirpath, each.server) for each in parts}
    tiers |= {(found["dirpath"], found["server"])} if found["dirpath"] is not None else set()
    say(f"namespace: {found['namespace']}, in {printable(str(found['root'].parent))}")
    # The server only if it tells two apart.
    dirpaths = [dirpath for dirpath, _ in tiers]
    named = {each: " at ".join(filter(None, each if dirpaths.count(each[0]) > 1 else each[:1])) for each in tiers}
    for name in sorted(named.values()):
        say(f"dirpath: {printable(name)}")
    # On a terminal there is little room, and the line above has said it.
    shown = 7 if is_terminal() and len(tiers) == 1 else 8
    own, copies = _rows(found, named, replicas=False), _rows(found, named, replicas=True)
    show("Checkpoints in memory", [row[:shown] for row in own], *_COLUMNS[:shown])
    if copies:
        say("Copies kept for other nodes:")
        show("", [row[:shown] for row in copies], *_COLUMNS[:shown])
    if waiting:
        say("Operations that wait for the durable tier:")
        pending = [
            (each["action"], each["name"], each["target"] or "", named.get((each["dirpath"], each["server"]), ""))
            for each in waiting
        ]
        show("", pending, "operation", "name", "target", "dirpath")
    if outcomes:
        say("Last operations on the durable tier:")
        last = [
            (
                each["action"],
                each["name"],
                each["outcome"],
                size_text(each["size_bytes"]) if each["size_bytes"] else "",
                each["error"] or "",
            )
            for each in reversed(outcomes[-_SHOWN_OUTCOMES:])
        ]
        show("", last, "operation", "name", "outcome", "size", "error")
    seen, work = "has not run", ""
    if drain["last_seen"] is not None:
        age = datetime.now(timezone.utc) - drain["last_seen"]
        seen = f"process {drain['pid']}, last seen {age.total_seconds():.0f} s ago"
    if drain["name"] is not None:
        work = f", {drain['name']} {size_text(drain['done_bytes'])} of {size_text(drain['total_bytes'])}"
    say(printable(f"drain: {seen}, {len(waiting)} pending{work}"))
    if drain["last_error"] is not None:
        say(printable(f"last error: {drain['last_error']}"))


def _rows(found: Mapping[str, Any], named: Mapping[tuple[str, str | None], str], *, replicas: bool) -> list[_Row]:
    """The own parts, or the replicas, the newest first, and those of them that can't be read."""
    parts = [each for each in reversed(found["parts"]) if (each.tier == "replicas") is replicas]
    broken = [each for each in found["damaged"] if (each["tier"] == "replicas") is replicas]
    return [
        *(_row(each, named[each.dirpath, each.server]) for each in parts),
        *((str(each["folder"]), "", "", "", f"damaged: {each['error']}", "", "", "") for each in broken),
    ]


def _row(part: HeldPart, dirpath: str) -> _Row:
    state = "replica" if part.tier == "replicas" else part_text(part.state)
    # Of a save of several ranks, only all parts together are safe.
    safe = "yes" if part.is_replicated else "no"
    step = str(part.step) if part.step is not None else ""
    note = "latest" if part.is_latest else "" if part.resumable else "not resumable"
    disk = " (on disk)" if part.tier == "spill" else ""
    return part.name, step, str(part.rank), size_text(part.size_bytes), f"{state}{disk}", safe, note, dirpath
