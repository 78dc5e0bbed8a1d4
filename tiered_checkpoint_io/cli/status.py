"""The command that shows this node's memory and its queue, for people, for programs, or as metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_checkpoint_io.cli.listing import PART_STATES
from tiered_checkpoint_io.cli.options import Nodes, Output, path_of
from tiered_checkpoint_io.cli.output import Columns, cells_of, is_terminal, say, show, write, write_json
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import tier_at
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.inventory.node import HeldPart, Tier, held_part, tier_of, time_of
from tiered_checkpoint_io.inventory.rows import marked
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.metrics import Sample, collect, prometheus_text, write_textfile
from tiered_checkpoint_io.model import ids

_SHOWN_OUTCOMES = 10


@dataclass(frozen=True)
class DamagedPart:
    """A part in memory that can't be read."""

    folder: Path
    tier: Tier
    error: str


@dataclass(frozen=True)
class Waiting:
    """An operation that waits for the durable tier."""

    action: str
    name: str
    target: str | None
    dirpath: str
    server: str | None


@dataclass(frozen=True)
class Done:
    """An operation on the durable tier that has ended."""

    action: str
    name: str
    dirpath: str
    step: int | None
    outcome: str
    error: str | None
    size_bytes: int
    duration_s: float
    finished: datetime | None
    attempts: int


@dataclass(frozen=True)
class Progress:
    """The drain; None for unknown facts."""

    pid: int | None
    last_seen: datetime | None
    name: str | None
    done_bytes: int
    total_bytes: int
    rate_bytes_per_s: float
    last_error: str | None


@dataclass(frozen=True)
class Namespace:
    """The memory of one namespace, its queue, the last outcomes, and its drain."""

    namespace: str
    root: Path
    dirpath: str | None
    server: str | None
    parts: Sequence[HeldPart]
    damaged: Sequence[DamagedPart]
    waiting: Sequence[Waiting]
    outcomes: Sequence[Done]
    drain: Progress


@dataclass(frozen=True, kw_only=True)
class Status(Output, Nodes):
    """Shows this node's memory, and the operations that wait for the durable tier. Asks no server.

    "latest" marks the checkpoint that tiered:latest would take of this node's memory: the latest save (not the
    greatest step) that training can resume from, and that is complete here or with replicas on other nodes.
    """

    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics as Prometheus' text instead: docs/operations.md.")
    ] = False
    textfile: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="PATH",
            help="With --prometheus: replace this file instead, for node_exporter's textfile collector.",
        ),
    ] = None

    def run(self) -> None:
        """Prints each namespace, or the metrics of all."""
        if self.as_json and self.prometheus:
            raise typer.BadParameter("give --json or --prometheus")
        if self.textfile is not None and not self.prometheus:
            raise typer.BadParameter("--textfile needs --prometheus")
        roots = self.roots()
        if not roots:
            say(f"no namespace of this user has a memory tier in {self.memory_dir}", err=True)
        if self.prometheus:
            _write_metrics(roots, self.textfile)
            return
        found = [_look(each) for each in roots]
        if self.as_json:
            write_json("status", {"namespaces": found})
            return
        for number, each in enumerate(found):
            if number:
                say("")
            _show(each)


def _write_metrics(roots: Sequence[Path], textfile: Path | None) -> None:
    samples: list[Sample] = []
    for root in roots:
        # Deleted meanwhile, or no descriptor is left: the next look tries again. Alerts see a missing series.
        with contextlib.suppress(OSError, TieredCheckpointError):
            samples += collect(root)
    text = prometheus_text(samples)
    if textfile is None:
        write(text.removesuffix("\n"))
        return
    try:
        write_textfile(textfile, text)
    except OSError as error:
        why = f"metrics can't be written to {textfile}: {error.strerror or error}"
        raise ConfigError(why, hint="name a file in a folder that this user may write to") from error


def _look(root: Path) -> Namespace:
    tier, queue = tier_at(root), Queue(root)
    outcomes, drain, place = queue.outcomes(), queue.progress(), tier.place
    return Namespace(
        namespace=root.name,
        root=root,
        dirpath=place.dirpath if place is not None else None,
        server=(place.endpoint or None) if place is not None else None,
        parts=marked([held_part(tier, each, outcomes) for each in tier.held()]),
        damaged=[DamagedPart(folder, tier_of(tier, folder), str(error)) for folder, error in tier.unreadable()],
        waiting=[
            Waiting(each.action, each.name, each.target or None, each.dirpath, each.place.endpoint or None)
            for each in queue.look(tier)
        ],
        outcomes=[
            Done(
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
            for each in outcomes
        ],
        drain=Progress(
            pid=drain.pid or None,
            last_seen=time_of(drain.heartbeat) if drain.pid else None,
            name=drain.name or None,
            done_bytes=drain.bytes_done,
            total_bytes=drain.bytes_total,
            rate_bytes_per_s=drain.rate,
            last_error=drain.last_error or None,
        ),
    )


# ------------------------------------------------------------------------------------------ text
def _show(found: Namespace) -> None:
    tiers = {(each.dirpath, each.server) for each in found.parts}
    tiers |= {(each.dirpath, each.server) for each in found.waiting if each.dirpath}
    tiers |= {(found.dirpath, found.server)} if found.dirpath is not None else set()
    say(f"namespace: {found.namespace}, in {found.root.parent}")
    # The server is shown only if two tiers differ by it.
    dirpaths = [dirpath for dirpath, _ in tiers]
    named = {each: " at ".join(filter(None, each if dirpaths.count(each[0]) > 1 else each[:1])) for each in tiers}
    for name in sorted(named.values()):
        say(f"dirpath: {name}")
    where: Columns = {"dirpath": lambda each: named.get((each.dirpath, each.server), "")}
    # On a terminal there is little room, and the line above has said it.
    parts: Columns = {**_PARTS, **({} if is_terminal() and len(tiers) == 1 else where)}
    for is_replica, title in ((False, "Checkpoints in memory"), (True, "")):
        held = [each for each in reversed(found.parts) if (each.tier == "replicas") is is_replica]
        broken = [each for each in found.damaged if (each.tier == "replicas") is is_replica]
        if is_replica and not (held or broken):
            continue
        if is_replica:
            say("Copies kept for other nodes:")
        show([*held, *broken], {name: _of_part(name, column) for name, column in parts.items()}, title=title)
    if found.waiting:
        say("Operations that wait for the durable tier:")
        show(found.waiting, {"operation": "action", "name": "name", "target": "target", **where})
    if found.outcomes:
        say("Last operations on the durable tier:")
        show(reversed(found.outcomes[-_SHOWN_OUTCOMES:]), _OUTCOMES)
    drain, seen, work = found.drain, "has not run", ""
    if drain.last_seen is not None:
        age = datetime.now(timezone.utc) - drain.last_seen
        seen = f"process {drain.pid}, last seen {age.total_seconds():.0f} s ago"
    if drain.name is not None:
        work = f", {drain.name} {size_text(drain.done_bytes)} of {size_text(drain.total_bytes)}"
    say(f"drain: {seen}, {len(found.waiting)} pending{work}")
    if drain.last_error is not None:
        say(f"last error: {drain.last_error}")


def _of_part(name: str, column: str | Callable[[Any], object]) -> Callable[[Any], object]:
    """Returns the cell of a part, or of a damaged one, of which only the folder is known."""

    def cell(row: object) -> object:
        if isinstance(row, DamagedPart):
            return {"name": row.folder, "state": f"damaged: {row.error}"}.get(name)
        (text,) = cells_of(row, {name: column})
        return text

    return cell


def _state(part: HeldPart) -> str:
    state = "replica" if part.tier == "replicas" else PART_STATES[part.state]
    return f"{state} (on disk)" if part.tier == "spill" else state


_PARTS: Columns = {
    "name": "name",
    "step": "step",
    "rank": "rank",
    "size": "size_bytes",
    "state": _state,
    # Of a save of several ranks, only all parts together are safe.
    "replicated": "is_replicated",
    "note": lambda each: "latest" if each.is_latest else "" if each.resumable else "not resumable",
}
_OUTCOMES: Columns = {
    "operation": "action",
    "name": "name",
    "outcome": "outcome",
    "size": lambda each: size_text(each.size_bytes) if each.size_bytes else "",
    "error": "error",
}
