"""The command that shows this node's memory and its queue, for people, for programs, or as metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tiered_checkpoint_io.cli.listing import columns_of
from tiered_checkpoint_io.cli.options import Nodes, Output
from tiered_checkpoint_io.cli.output import Columns, say, show, write, write_json
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.inventory.node import Namespace, look_at
from tiered_checkpoint_io.inventory.rows import Look
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.metrics import prometheus_text

_SHOWN_OUTCOMES = 10


@dataclass(frozen=True, kw_only=True)
class Status(Output, Nodes):
    """Shows this node's memory, and the operations that wait for the durable tier. Asks no server.

    "latest" marks the checkpoint that tiered:latest would take of this node's memory: the latest save (not the
    greatest step) that training can resume from, and that is complete here or with replicas on other nodes.
    """

    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics as Prometheus' text instead: docs/operations.md.")
    ] = False

    def run(self) -> None:
        """Prints each namespace, or the metrics of all."""
        if self.as_json and self.prometheus:
            raise typer.BadParameter("give --json or --prometheus")
        roots = self.roots()
        if not roots:
            say(f"no namespace of this user has a memory tier in {self.memory_dir}", err=True)
        if self.prometheus:
            write(prometheus_text(roots).removesuffix("\n"))
            return
        found = list(map(look_at, roots))
        if self.as_json:
            write_json("status", {"namespaces": list(map(_document, found))})
            return
        for number, each in enumerate(found):
            if number:
                say("")
            _show(each)


def _document(found: Namespace) -> dict[str, Any]:
    """Returns a namespace for programs."""
    return {
        "namespace": found.root.name,
        "root": found.root,
        "place": found.place,
        "parts": found.held,
        "damaged": [each for each in found.broken if each.tier is not None],
        "waiting": found.waiting,
        "outcomes": found.outcomes,
        "drain": found.drain,
    }


# ------------------------------------------------------------------------------------------ text
def _show(found: Namespace) -> None:
    places = sorted(found.places | ({found.place} if found.place is not None else set()), key=str)
    say(f"namespace: {found.root.name}, in {found.root.parent}")
    for place in places:
        say(f"dirpath: {place}")
    rows = [row for place in places for row in Look(place, [found]).checkpoints]
    show(rows, columns_of(rows, with_dirpath=len(places) > 1), title="Checkpoints in memory")
    if found.waiting:
        say("Operations that wait for the durable tier:")
        show(found.waiting, {"operation": "action", "name": "name", "target": "target", "dirpath": "dirpath"})
    if found.outcomes:
        say("Last operations on the durable tier:")
        show(reversed(found.outcomes[-_SHOWN_OUTCOMES:]), _OUTCOMES)
    drain, seen, work = found.drain, "has not run", ""
    if drain.pid:
        seen = f"process {drain.pid}, last seen {SYSTEM.wall() - drain.heartbeat:.0f} s ago"
    if drain.name:
        work = f", {drain.name} {size_text(drain.bytes_done)} of {size_text(drain.bytes_total)}"
    say(f"drain: {seen}, {len(found.waiting)} pending{work}")
    if drain.last_error:
        say(f"last error: {drain.last_error}")


_OUTCOMES: Columns = {
    "operation": "action",
    "name": "name",
    "outcome": "state",
    "size": lambda each: size_text(each.bytes) if each.bytes else "",
    "error": "error",
}
