"""The command that lists the checkpoints of all tiers."""

from __future__ import annotations

from datetime import datetime, timezone

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.documents import Listed
from tiered_checkpoint_io.cli.options import SERVER, SHM, AnyDirpath, Json, MemoryDir, Server, has_memory
from tiered_checkpoint_io.cli.output import printable, say, show, write_json
from tiered_checkpoint_io.cli.rows import table_of
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.inventory.listing import checkpoints_of
from tiered_checkpoint_io.inventory.look import Look, Looker
from tiered_checkpoint_io.inventory.node import look_at_node
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.redaction import without_secrets
from tiered_checkpoint_io.stores import place_of

_DAMAGED = ("corrupt", "newer_release")


def list_all(
    dirpath: AnyDirpath = None,
    memory_dir: MemoryDir = SHM,
    server: Server = SERVER,
    as_json: Json = False,
) -> None:
    """Lists the checkpoints of a durable tier and what this node's memory has of it, the latest save first.

    Without a dirpath: all that this node's memory has, without asking a server.

    "latest" marks the one that tiered:latest means of these: the latest save (not the greatest step) that training can
    resume from. Where something else than a terminal reads the output, columns are separated by tabs.
    """
    if dirpath is None:
        node = look_at_node(memory_dir)
        found = [each for place in node.places for each in checkpoints_of(place, None, node)]
        error = None
    else:
        look, error = look_at(server.config(dirpath), memory_dir)
        found = look.checkpoints
        dirpath = without_secrets(look.place.dirpath)
    if as_json:
        text = str(error) if error is not None else None
        write_json("ls", Listed(dirpath, text, found))
    else:
        columns, cells = table_of(found, datetime.now(timezone.utc), with_dirpath=dirpath is None)
        show(dirpath or f"node memory, {memory_dir}", cells, *columns)
    if error is not None:
        raise error
    raise typer.Exit(1 if any(each.state in _DAMAGED for each in found) else 0)


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
