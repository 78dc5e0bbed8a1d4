"""The command that fetches a checkpoint from the durable tier to this node's memory, or to a folder."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.documents import Pulled
from tiered_checkpoint_io.cli.options import SERVER, SHM, Dirpath, Json, MemoryDir, Server, name_of, path_of, wrong_use
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.inventory.roots import roots_of
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores import Store, place_of


def pull(
    dirpath: Dirpath,
    name: Annotated[str, typer.Argument(help="The checkpoint; by default the one that a restart would take.")] = (
        ids.LATEST
    ),
    to: Annotated[
        Path | None,
        typer.Option(parser=path_of, metavar="PATH", help="A folder to write the files to, in place of node memory."),
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this rank's part; may be repeated. All by default.")
    ] = None,
    memory_dir: MemoryDir = SHM,
    namespace: Annotated[
        str | None, typer.Option(help="The job's namespace; by default the one that is made from DIRPATH.")
    ] = None,
    server: Server = SERVER,
    json: Json = False,
) -> None:
    """Brings a checkpoint from the durable tier to this node's memory, verified; a restart then reads it from there.

    Of a checkpoint of several ranks, all parts by default: give --rank for those of this node's ranks alone. It is in
    memory with all parts that were asked for, or not at all.
    """
    config = server.config(dirpath)
    with wrong_use():
        config = replace(config, memory_dir=memory_dir)
        config = replace(config, namespace=namespace) if namespace is not None else config
        wanted = name_of(config, name)
    if to is None and namespace is None:
        _say_where_the_job_is(config)
    stop = threading.Event()

    # Before the server is asked: torch takes its time.
    from tiered_checkpoint_io.cli import pulling

    def fetch(store: Store) -> tuple[list[Part], list[Part]]:
        return pulling.fetch(config, store, wanted, rank or (), to, stop, silent=json)

    parts, fetched = ask(config, fetch, stop=stop)
    content, size = parts[0].content, sum(part.content.size for part in fetched)
    where = str(to) if to is not None else f"node memory, namespace {config.namespace}"
    if json:
        namespace = config.namespace if to is None else None
        ranks, step = [part.rank for part in parts], ids.known(content.step)
        write_json("pull", Pulled(parts[0].name, config.dirpath, step, namespace, to, ranks, size))
    elif fetched:
        say(printable(f"pulled {parts[0].name} ({size_text(size)}) to {where}"))
    else:
        say(printable(f"{parts[0].name} is in {where} already, intact"))


def _say_where_the_job_is(config: TieredCheckpointConfig) -> None:
    """Says so where a job of this dirpath has named a namespace here: a restart of it looks nowhere else."""
    ours = config.namespace
    with contextlib.suppress(ConfigError):
        theirs = [root.name for root in roots_of(config.memory_dir, place_of(config))]
        if theirs and ours not in theirs:
            text = f"a restart of the job that saved to {config.dirpath} here looks in namespace {theirs[0]} alone"
            say(printable(f"{text}, and this goes to {ours}; to have it there, give --namespace {theirs[0]}"), err=True)
