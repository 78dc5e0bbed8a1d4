"""The command ``report``: a run as one HTML page."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.documents import Reported
from tiered_checkpoint_io.cli.options import NODE, SERVER, Json, Node, Server, path_of
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.engine.drain.stores import last_config
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.inventory.durable import checkpoints
from tiered_checkpoint_io.inventory.roots import existing, roots_of
from tiered_checkpoint_io.memory.private import scratch_beside
from tiered_checkpoint_io.metrics.report import page
from tiered_checkpoint_io.model.events import Event
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores import place_of


def report(
    dirpath: Annotated[
        str | None, typer.Argument(help="The durable tier, to list what it holds; without it, no server is asked.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", parser=path_of, metavar="PATH", help="The file to write.")
    ] = Path("report.html"),
    node: Node = NODE,
    server: Server = SERVER,
    json_output: Json = False,
) -> None:
    """Writes a run as one HTML page: a timeline of steps, stalls, saves, uploads, failures and restores.

    Events are those that this node's memory has of the run; so give the page while the node lives. The page asks for
    nothing from elsewhere, and may be sent around as it is.
    """
    durable: list[Manifest] | None = None
    if dirpath is not None:
        config = server.config(dirpath)
        durable = [each.manifest for each in ask(config, checkpoints) if each.manifest is not None]
        dirpath = config.dirpath
        if not node.is_named:
            roots = roots_of(node.memory_dir, place_of(config))
            node = replace(node, namespace=roots[0].name if roots else config.namespace)
    title, events = node.namespace or "", list[Event]()
    try:
        found = existing(node.path)
        title, events = found.name, read_events(found)
        last = last_config(found)
        dirpath = dirpath or (last.dirpath if last is not None else "")
    except ConfigError as missing:
        if dirpath is None:
            raise
        say(f"without events: {printable(missing.message)}; name the run's namespace by --namespace", err=True)
    if not events and not durable:
        raise ConfigError(
            "nothing is known of this run: no event on this node, no checkpoint listed", hint="give dirpath"
        )
    text = page(title or dirpath, events, durable or (), dirpath=dirpath, now=time.time())
    try:
        is_file = _write(output, text.encode())
    except OSError as error:
        raise ConfigError(f"{output} can't be written: {error.strerror or error}") from error
    if json_output:
        listed = len(durable) if durable is not None else None
        write_json("report", Reported(output.absolute(), len(events), listed))
    else:
        there = f", {len(durable)} checkpoints on the durable tier" if durable is not None else ""
        text = f"wrote {printable(str(output))}: {len(events)} events{there}"
        # The page itself may be on stdout.
        say(text, err=not is_file)


def _write(output: Path, data: bytes) -> bool:
    """Writes a file, behind links too, so that a reader sees the old page or the new one; whether it is a file.

    What is none, such as /dev/stdout or a pipe, is written through, and stays what it is.
    """
    if output.exists() and os.path.samestat(output.stat(), os.fstat(1)):
        # A file that stdout goes to has more than this page.
        with open(1, "wb", closefd=False) as stdout:
            stdout.write(data)
        return False
    if output.exists() and not output.is_file():
        output.write_bytes(data)
        return False
    target = Path(os.path.realpath(output))
    fresh = scratch_beside(target)
    try:
        fresh.write_bytes(data)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return True
