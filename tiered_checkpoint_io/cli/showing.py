"""The command that shows all that is known of one checkpoint."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.documents import Shown
from tiered_checkpoint_io.cli.listing import look_at
from tiered_checkpoint_io.cli.options import SERVER, SHM, Dirpath, Json, MemoryDir, Server, name_of
from tiered_checkpoint_io.cli.output import printable, say, show, write_json
from tiered_checkpoint_io.cli.rows import age_text, names_of, note_of, part_text, state_text
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.inventory.details import PartHere, Save, details_of
from tiered_checkpoint_io.inventory.record import iso
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids


def show_checkpoint(
    dirpath: Dirpath,
    name: Annotated[str, typer.Argument(help="The checkpoint, or tiered:latest.")],
    memory_dir: MemoryDir = SHM,
    server: Server = SERVER,
    as_json: Json = False,
) -> None:
    """Shows all that is known of a checkpoint: facts, tiers, parts, files, aliases, and what wrote it."""
    config = server.config(dirpath)
    wanted = name_of(config, name)
    look, error = look_at(config, memory_dir)
    if error is None:
        found = ask(config, lambda store: details_of(wanted, look, store))
    else:
        found = details_of(wanted, look, None)
        if not found:
            # What the durable tier has under that name is not known.
            raise error
    if not found:
        is_name = wanted != ids.LATEST
        raise CheckpointNotFoundError(
            f"no such checkpoint: {wanted}" if is_name else "no checkpoint that training can resume from",
            operation="show",
            key=config.dirpath,
            hint="list what is there: tiered-ckpt ls",
        )
    if as_json:
        text = str(error) if error is not None else None
        write_json("show", Shown(wanted, text, found))
    else:
        for number, each in enumerate(found):
            if number:
                say("")
            _show(each, names_of(look.checkpoints))
    if error is not None:
        raise error
    is_damaged = any(each.checkpoint.state in ("corrupt", "newer_release") for each in found)
    raise typer.Exit(1 if is_damaged else 0)


def _show(each: Save, names: dict[str, str]) -> None:
    info = each.checkpoint
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
        "manifest": each.manifest_key,
        "aliases": ", ".join(each.aliases),
        "being overwritten": ", ".join(each.previous_save_ids),
        "namespace": each.namespace,
        "ranks of the job": each.world_size,
        "written by": ", ".join(f"{what} {version}" for what, version in each.writer.items()),
    }
    for what, value in facts.items():
        if value not in (None, ""):
            say(printable(f"{what}: {value}"))
    if each.held_parts:
        say("Parts on this node:")
        columns = ("rank", "tier", "size", "state", "replicated", "namespace", "folder")
        show("", [_part_row(part) for part in each.held_parts], *columns)
    if each.files:
        say("Files:")
        show("", [(file.path, size_text(file.size_bytes)) for file in each.files], "path", "size")


def _part_row(each: PartHere) -> tuple[str, ...]:
    return (
        str(each.rank),
        each.tier,
        size_text(each.size_bytes),
        part_text(each.state),
        "yes" if each.is_replicated else "no",
        each.namespace,
        str(each.folder),
    )
