"""The commands that list: the checkpoints of all tiers, or this node's memory and its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.options import Address, AnyDirpath, Memory, Name, Nodes, Output, name_of
from tiered_checkpoint_io.cli.output import Columns, cells_of, say, show, write, write_json
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError, without_secrets
from tiered_checkpoint_io.inventory.node import Namespace, look_at, look_at_node, places_of
from tiered_checkpoint_io.inventory.rows import CheckpointInfo, CheckpointState, Details, Look, Tiers, details_of
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.metrics import prometheus_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_DAMAGED = ("corrupt", "newer_release")
_STATES: dict[CheckpointState, str] = {"memory_only": "memory only", "newer_release": "of a newer release"}
#: Limit of an age in one unit, seconds, the length of the unit, and its name.
_UNITS = ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "d"))


@dataclass(frozen=True, kw_only=True)
class Ls(Output, Address, Memory):
    """Lists the checkpoints of both tiers, the latest save first; or shows one.

    Without DIRPATH it lists this node's memory and asks no server. With NAME it shows one checkpoint: facts, tiers,
    parts, files, aliases, and the software that wrote it.

    "latest" marks the checkpoint that tiered:latest means: the latest save (not the greatest step) that training can
    resume from. In a pipe, tabs separate the columns.
    """

    dirpath: AnyDirpath = None
    name: Name = None

    def run(self) -> None:
        """Prints the rows; the status is 1 if one is damaged."""
        dirpath, error = None, None
        found: Sequence[CheckpointInfo]
        if self.dirpath is None:
            node = look_at_node(self.memory_dir)
            found = [each for place in places_of(node) for each in Look(place, node).checkpoints]
        else:
            config = self.config(self.dirpath)
            wanted = name_of(config, self.name) if self.name is not None else None
            look, error = self._look(config)
            found = look.checkpoints if wanted is None else _details(wanted, config, look, error)
            dirpath = without_secrets(look.place.dirpath)
        if self.as_json:
            text = str(error) if error is not None else None
            write_json("ls", {"dirpath": dirpath, "durable_error": text, "checkpoints": found})
        elif self.name is None:
            columns = columns_of(found, with_dirpath=dirpath is None)
            show(found, columns, title=dirpath or f"node memory, {self.memory_dir}")
        else:
            for number, each in enumerate(found):
                if number:
                    say("")
                if isinstance(each, Details):
                    _show_details(each)
        if error is not None:
            raise error
        raise typer.Exit(1 if any(each.state in _DAMAGED for each in found) else 0)

    def _look(self, config: TieredCheckpointConfig) -> tuple[Look, StoreError | None]:
        """Looks at both tiers; if the durable one does not answer, at memory, and returns (or raises) the error."""
        # On a machine that has no node memory in the default place, only at the durable one.
        tiers, error = Tiers(config, self.memory_dir if self.has_memory else None), None
        try:
            look = ask(config, tiers.look)
        except StoreError as silent:
            look, error = tiers.look(None), silent
        for place in places_of(look.node):
            if place != look.place and place.dirpath == look.place.dirpath:
                say(f"node memory has checkpoints of {place}, which is another server: see --endpoint-url", err=True)
        if error is not None and not look.checkpoints:
            raise error
        return look, error


def _details(wanted: str, config: TieredCheckpointConfig, look: Look, error: StoreError | None) -> list[Details]:
    if error is None:
        found = ask(config, lambda store: details_of(wanted, look, store))
    else:
        found = details_of(wanted, look, None)
        if not found:
            # The durable tier may have that name.
            raise error
    if not found:
        is_name = wanted != ids.LATEST
        raise CheckpointNotFoundError(
            f"no such checkpoint: {wanted}" if is_name else "no checkpoint that training can resume from",
            operation="ls",
            key=config.dirpath,
            hint="list the names: tiered-ckpt ls DIRPATH",
        )
    return found


# ------------------------------------------------------------------------------------------ text
def columns_of(rows: Sequence[CheckpointInfo], *, with_dirpath: bool = False) -> Columns:
    """Returns the columns of a table of checkpoints."""
    names = {each.save_id: each.name for each in rows if not each.alias_of}
    return {
        "name": "name",
        "step": lambda each: "?" if each.step is None and each.kind is None else each.step,
        "size": lambda each: size_text(each.size_bytes) if each.kind is not None else "?",
        "age": lambda each: age_text(each.created),
        "metric": lambda each: f"{each.metric.monitor}={each.metric.value:.6g}" if each.metric is not None else "",
        "where": lambda each: ", ".join(each.where),
        "kind": lambda each: f"{each.kind or '?'}{'' if each.resumable or each.kind is None else ', not resumable'}",
        "state": lambda each: _STATES.get(each.state, each.state),
        "note": lambda each: _note(each, names),
        **({"dirpath": "dirpath"} if with_dirpath else {}),
    }


def _note(each: CheckpointInfo, names: Mapping[str, str]) -> str:
    notes = ["latest"] if each.is_latest else []
    if each.alias_of:
        notes.append(f"alias of {each.alias_of}")
    if each.copy_of:
        notes.append(f"copy of {names.get(each.copy_of, 'a deleted checkpoint')}")
    if each.parts > each.parts_here and "durable" not in each.where and each.where:
        notes.append(f"{each.parts_here} of {each.parts} parts on this node")
    return "; ".join([*notes, *([each.problem] if each.problem else [])])


def age_text(created: datetime | None) -> str:
    """Returns how long ago something was made, such as ``90 s``, ``5 min``, ``30 h`` or ``4 d``; "?" if unknown."""
    if created is None:
        return "?"
    # The writer's clock may be ahead.
    age = max(0.0, (datetime.now(timezone.utc) - created).total_seconds())
    return next(f"{age // seconds:.0f} {unit}" for bound, seconds, unit in _UNITS if age < bound)


def _show_details(info: Details) -> None:
    facts = [each.name for each in fields(info) if each.name not in ("files", "held_parts")]
    for name, cell in zip(facts, cells_of(info, {each: each for each in facts}), strict=True):
        if cell:
            say(f"{name.removesuffix('_bytes').replace('_', ' ')}: {cell}")
    if info.held_parts:
        say("Parts on this node:")
        show(info.held_parts, {each: each for each in ("rank", "tier", "size_bytes", "state", "namespace", "folder")})
    if info.files:
        say("Files:")
        show(info.files, {"path": "path", "size": "size_bytes"})


# --------------------------------------------------------------------------------------- status
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
            write_json("status", {"namespaces": found})
            return
        for number, each in enumerate(found):
            if number:
                say("")
            _show(each)


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
