"""The command that lists the checkpoints of all tiers, and shows all that is known of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.options import SERVER, SHM, AnyDirpath, Json, MemoryDir, Name, Server, has_memory, name_of
from tiered_checkpoint_io.cli.output import is_terminal, printable, say, show, write_json
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError
from tiered_checkpoint_io.inventory.node import HeldPart, PartState, look_at_node
from tiered_checkpoint_io.inventory.rows import CheckpointInfo, CheckpointState, Details, Look, Looker, details_of, iso
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.redaction import without_secrets
from tiered_checkpoint_io.stores import place_of

_DAMAGED = ("corrupt", "newer_release")
COLUMNS = ("name", "step", "size", "age", "metric", "where", "kind", "state", "note")
_STATES: dict[CheckpointState, str] = {"memory_only": "memory only", "newer_release": "of a newer release"}
_PART_STATES: dict[PartState, str] = {
    "waiting": "waits for the durable tier",
    "durable": "durable",
    "sent": "part sent",
    "unknown": "not known here",
    "memory_only": "memory only",
}
#: Where an age in one unit ends, seconds, and how many of them the unit has.
_UNITS = ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h"))


def list_all(
    dirpath: AnyDirpath = None,
    name: Name = None,
    memory_dir: MemoryDir = SHM,
    server: Server = SERVER,
    as_json: Json = False,
) -> None:
    """Lists the checkpoints of both tiers, the latest save first; or shows one.

    Without DIRPATH it lists this node's memory and asks no server. With NAME it shows one checkpoint: facts, tiers,
    parts, files, aliases, and the software that wrote it.

    "latest" marks the checkpoint that tiered:latest means: the latest save (not the greatest step) that training can
    resume from. In a pipe, tabs separate the columns.
    """
    error: StoreError | None = None
    found: Sequence[CheckpointInfo]
    if dirpath is None:
        node = look_at_node(memory_dir)
        found = [each for place in node.places for each in Look(place, node).checkpoints]
    else:
        config = server.config(dirpath)
        wanted = name_of(config, name) if name is not None else None
        look, error = look_at(config, memory_dir)
        found = look.checkpoints if wanted is None else _details(wanted, config, look, error)
        dirpath = without_secrets(look.place.dirpath)
    if as_json:
        text = str(error) if error is not None else None
        write_json("ls", {"dirpath": dirpath, "durable_error": text, "checkpoints": found})
    elif name is None:
        columns, cells = table_of(found, datetime.now(timezone.utc), with_dirpath=dirpath is None)
        show(dirpath or f"node memory, {memory_dir}", cells, *columns)
    else:
        for number, each in enumerate(found):
            if number:
                say("")
            if isinstance(each, Details):
                _show_details(each, names_of(look.checkpoints))
    if error is not None:
        raise error
    raise typer.Exit(1 if any(each.state in _DAMAGED for each in found) else 0)


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


def look_at(config: TieredCheckpointConfig, memory_dir: str) -> tuple[Look, StoreError | None]:
    """Looks at both tiers; where the durable one does not answer, at memory, and gives the error as well.

    Raises:
        StoreError: The durable tier does not answer, and memory has nothing of it.
    """
    looker = looker_of(config, memory_dir)
    try:
        look = ask(config, looker.look)
    except StoreError as error:
        look = looker.look(None)
        _say_other_servers(look)
        if not look.checkpoints:
            raise
        return look, error
    _say_other_servers(look)
    return look, None


def looker_of(config: TieredCheckpointConfig, memory_dir: str) -> Looker:
    """Looks at both tiers; at the durable one alone on a machine that has no node memory where it is by default."""
    return Looker(place_of(config), memory_dir if has_memory(memory_dir) else None)


def _say_other_servers(look: Look) -> None:
    """Says where memory has checkpoints of the same dirpath on another server."""
    for place in look.node.places:
        if place != look.place and place.dirpath == look.place.dirpath:
            say(
                printable(f"node memory has checkpoints of {place}, which is another server: see --endpoint-url"),
                err=True,
            )


# ------------------------------------------------------------------------------------------ text
def table_of(
    checkpoints: Sequence[CheckpointInfo], now: datetime, *, with_dirpath: bool = False
) -> tuple[list[str], list[tuple[str, ...]]]:
    """The columns of a table of these, and its rows; on a terminal, without columns that say nothing."""
    names = names_of(checkpoints)
    columns = [*COLUMNS, *(["dirpath"] if with_dirpath else [])]
    rows = [(*_row(each, names, now), *([each.dirpath] if with_dirpath else [])) for each in checkpoints]
    if rows and is_terminal():
        kept = [index for index in range(len(columns)) if any(row[index] not in ("", "full") for row in rows)]
        return [columns[index] for index in kept], [tuple(row[index] for index in kept) for row in rows]
    return columns, rows


def names_of(checkpoints: Iterable[CheckpointInfo]) -> dict[str, str]:
    """What :func:`note_of` takes: the names of saves, by their ids."""
    return {each.save_id: each.name for each in checkpoints if not each.alias_of}


def _row(each: CheckpointInfo, names: dict[str, str], now: datetime) -> tuple[str, ...]:
    is_known = each.kind is not None
    metric = f"{each.metric.monitor}={each.metric.value:.6g}" if each.metric is not None else ""
    kind = each.kind or "?"
    return (
        each.name,
        str(each.step) if each.step is not None else "" if is_known else "?",
        size_text(each.size_bytes) if is_known else "?",
        age_text(each.created, now),
        metric,
        ", ".join(each.where),
        f"{kind}, not resumable" if is_known and not each.resumable else kind,
        state_text(each),
        note_of(each, names),
    )


def state_text(each: CheckpointInfo) -> str:
    """A state, for people."""
    return _STATES.get(each.state, each.state)


def part_text(state: PartState) -> str:
    """What has become of a part in node memory, for people."""
    return _PART_STATES[state]


def note_of(each: CheckpointInfo, names: dict[str, str]) -> str:
    """What else is to be said of a checkpoint; ``names`` are those of the other saves, by their ids."""
    notes = ["latest"] if each.is_latest else []
    if each.alias_of:
        notes.append(f"alias of {each.alias_of}")
    if each.copy_of:
        notes.append(f"copy of {names.get(each.copy_of, 'a deleted checkpoint')}")
    if each.parts > each.parts_here and "durable" not in each.where and each.where:
        notes.append(f"{each.parts_here} of {each.parts} parts on this node")
    return "; ".join([*notes, *([each.problem] if each.problem else [])])


def age_text(created: datetime | None, now: datetime) -> str:
    """How long ago something was made, such as ``90 s``, ``5 min``, ``30 h`` or ``4 d``; "?" where it is not known."""
    if created is None:
        return "?"
    # The writer's clock may be ahead.
    age = max(0.0, (now - created).total_seconds())
    for bound, seconds, unit in _UNITS:
        if age < bound:
            return f"{age // seconds:.0f} {unit}"
    return f"{age // 86400:.0f} d"


def _show_details(info: Details, names: dict[str, str]) -> None:
    facts = {
        "name": info.name,
        "url": info.url,
        "state": state_text(info),
        "where": ", ".join(info.where),
        "note": note_of(replace(info, problem=""), names),
        "problem": info.problem,
        "step": info.step,
        "epoch": info.epoch,
        "metric": f"{info.metric.monitor} = {info.metric.value!r}" if info.metric is not None else "",
        "size": size_text(info.size_bytes),
        "created": f"{iso(info.created)}, {age_text(info.created, datetime.now(timezone.utc))} ago"
        if info.created
        else None,
        "kind": info.kind,
        "resumable": "yes" if info.resumable else "no",
        "parts": info.parts or None,
        "save id": info.save_id,
        "manifest": info.manifest_key,
        "aliases": ", ".join(info.aliases),
        "being overwritten": ", ".join(info.previous_save_ids),
        "namespace": info.namespace,
        "ranks of the job": info.world_size,
        "written by": ", ".join(f"{what} {version}" for what, version in info.writer.items()),
    }
    for what, value in facts.items():
        if value not in (None, ""):
            say(printable(f"{what}: {value}"))
    if info.held_parts:
        say("Parts on this node:")
        columns = ("rank", "tier", "size", "state", "replicated", "namespace", "folder")
        show("", [_part_row(part) for part in info.held_parts], *columns)
    if info.files:
        say("Files:")
        show("", [(file.path, size_text(file.size_bytes)) for file in info.files], "path", "size")


def _part_row(each: HeldPart) -> tuple[str, ...]:
    return (
        str(each.rank),
        each.tier,
        size_text(each.size_bytes),
        part_text(each.state),
        "yes" if each.is_replicated else "no",
        each.namespace,
        str(each.folder),
    )
