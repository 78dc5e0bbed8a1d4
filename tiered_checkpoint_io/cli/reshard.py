"""The command that writes a checkpoint anew, as another number of parts or as one file."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_checkpoint_io.cli.answers import answer, counter
from tiered_checkpoint_io.cli.documents import Resharded as Document
from tiered_checkpoint_io.cli.options import SERVER, Dirpath, Json, Server, name_of, path_of, wrong_use
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.cli.progress import Meter, progress
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids

if TYPE_CHECKING:
    from tiered_checkpoint_io.resharding import Resharded


def reshard(
    dirpath: Dirpath,
    name: Annotated[str, typer.Argument(help="The checkpoint, or tiered:latest.")],
    new_name: Annotated[str, typer.Option("--name", help="The name of the new checkpoint; it must be free.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Into as many parts as a job of so many ranks saves.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="As one file, in place of --ranks.")] = False,
    scratch: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="PATH", help="A folder on a disk with room; by default that of temporary files."
        ),
    ] = None,
    trust: Annotated[bool, typer.Option(help="Allow objects that may run code when loaded.")] = False,
    server: Server = SERVER,
    json: Json = False,
) -> None:
    """Writes a checkpoint anew, as another number of parts or as one file; every byte is verified.

    It is committed in DIRPATH under the new name, and the old one stays. What tiered:latest takes does not change.
    """
    config = server.config(dirpath)
    wanted = name_of(config, name)
    with wrong_use():
        new_name = ids.validate_new_name(new_name)
    if (ranks is None) is not full:
        raise typer.BadParameter("give either --ranks or --full")
    stop = threading.Event()

    # Before the server is asked: torch takes its time.
    from tiered_checkpoint_io.resharding import reshard_checkpoint

    def work() -> Resharded:
        with contextlib.ExitStack() as held:
            meters: list[Meter] = []

            def add(amount: int) -> None:
                meters[0].add(amount)

            return reshard_checkpoint(
                config.dirpath,
                wanted,
                new_name,
                parts=ranks,
                weights_only=not trust,
                scratch=scratch,
                progress=counter("reshard", config.dirpath, stop, add),
                begin=lambda total: meters.append(held.enter_context(progress("reshard", total, silent=json))),
                **server.keys,
            )

    made = answer(config, config.dirpath, work, stop=stop)
    step = ids.known(made.step)
    if json:
        write_json("reshard", Document(**{"dirpath": config.dirpath, **asdict(made), "step": step}))
        return
    what = "one file" if made.kind == "full" else f"{made.parts} parts" if made.parts > 1 else "one part"
    at = f"step {step}, " if step is not None else ""
    note = "" if made.resumable else "; not resumable: load it by name"
    say(printable(f"resharded {made.source} to {made.name} ({at}{what}, {size_text(made.size_bytes)}{note})"))
