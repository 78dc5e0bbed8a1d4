"""The command that writes a checkpoint of a durable tier for others."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.documents import Exported
from tiered_checkpoint_io.cli.options import ADDRESS, Address, Dirpath, Json, name_of, path_of
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.inventory.details import File
from tiered_checkpoint_io.logs import size_text


class Format(str, Enum):
    """What an export writes."""

    torch = "torch"
    safetensors = "safetensors"


def export(
    dirpath: Dirpath,
    name: Annotated[str, typer.Argument(help="The checkpoint, or tiered:latest.")],
    target: Annotated[
        Path,
        typer.Argument(
            parser=path_of, metavar="target", help="The file to write (torch), or the folder (safetensors)."
        ),
    ],
    file_format: Annotated[
        Format, typer.Option("--format", help="torch (one file) or safetensors (a folder).")
    ] = Format.torch,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="For safetensors: the tensors whose names begin so, named without it; 'state_dict.' by default."
        ),
    ] = None,
    max_shard_size: Annotated[int, typer.Option(min=1, help="For safetensors: bytes of one file.")] = 5 * 10**9,
    trust: Annotated[bool, typer.Option(help="Allow objects that may run code when loaded.")] = False,
    server: Address = ADDRESS,
    as_json: Json = False,
) -> None:
    """Writes a full or sharded checkpoint as files for others, in little memory; every byte is verified."""
    from tiered_checkpoint_io.export import export_checkpoint

    config = server.config(dirpath)
    written = export_checkpoint(
        config.dirpath,
        name_of(config, name),
        target,
        format=file_format.value,
        prefix=prefix,
        max_shard_size=max_shard_size,
        weights_only=not trust,
        **server.keys,
    )
    sizes = {str(file): file.stat().st_size for file in written}
    if as_json:
        write_json("export", Exported([File(path, size) for path, size in sizes.items()]))
        return
    for path, size in sizes.items():
        say(f"{printable(path)}: {size_text(size)}")
