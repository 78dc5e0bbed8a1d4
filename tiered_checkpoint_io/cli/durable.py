"""Commands over a durable tier: verify, export."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.catalog import Found, checkpoints, latest, read
from tiered_checkpoint_io.cli.options import (
    TIMEOUT_S,
    Dirpath,
    Endpoint,
    Json,
    Profile,
    Region,
    Timeout,
    config_of,
    name_of,
)
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    ManifestError,
    StoreNotFoundError,
)
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry, Manifest
from tiered_checkpoint_io.stores import Store

#: Bytes that are asked for at once: so many arrive within the timeout also over a slow line.
_PIECE = 4 << 20


class Format(str, Enum):
    """What an export writes."""

    torch = "torch"
    safetensors = "safetensors"


def verify_durable(
    dirpath: Dirpath,
    name: Annotated[str | None, typer.Argument(help="One checkpoint, or tiered:latest; all by default.")] = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Reads checkpoints of a durable tier and compares every byte with its hash."""
    config = config_of(dirpath, endpoint_url, region, profile, timeout)
    wanted = name_of(config, name) if name else None
    raise typer.Exit(0 if ask(config, lambda store: _verify_all(store, wanted)) else 1)


def export_durable(
    dirpath: Dirpath,
    name: Annotated[str, typer.Argument(help="The checkpoint, or tiered:latest.")],
    target: Annotated[Path, typer.Argument(help="The file to write (torch), or the folder (safetensors).")],
    file_format: Annotated[
        Format, typer.Option("--format", help="torch (one file) or safetensors (a folder).")
    ] = Format.torch,
    prefix: Annotated[
        str | None, typer.Option(help="For safetensors: of the tensors' names; 'state_dict.' by default.")
    ] = None,
    max_shard_size: Annotated[int, typer.Option(min=1, help="For safetensors: bytes of one file.")] = 5 * 10**9,
    trust: Annotated[bool, typer.Option(help="Allow objects that may run code when loaded.")] = False,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Writes a full or sharded checkpoint as files for others, in little memory; every byte is verified."""
    from tiered_checkpoint_io.export import export_checkpoint

    config = config_of(dirpath, endpoint_url, region, profile)
    written = export_checkpoint(
        config.dirpath,
        name_of(config, name),
        target,
        format=file_format.value,
        prefix=prefix,
        max_shard_size=max_shard_size,
        weights_only=not trust,
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
    )
    sizes = {str(file): file.stat().st_size for file in written}
    if as_json:
        write_json("export", {"files": [{"path": path, "size_bytes": size} for path, size in sizes.items()]})
        return
    for path, size in sizes.items():
        say(f"{printable(path)}: {size_text(size)}")


# ------------------------------------------------------------------------------------------------ verify
def _verify_all(store: Store, wanted: str | None) -> bool:
    """Verifies one checkpoint, or all; whether all are intact."""
    known: dict[str, str] = {}
    intact = True
    for each in _wanted(store, wanted):
        damage, name, manifest = str(each.error or ""), printable(each.name), each.manifest
        if manifest is not None:
            if manifest.alias_of and (target := read_manifest(store, manifest.alias_of)) is not None:
                manifest = target
            # What several names stand for is read once.
            save_id = manifest.content.save_id
            damage = known[save_id] = known[save_id] if save_id in known else _damage(store, manifest)
            if damage and read(store, manifest.name).manifest != manifest:
                say(f"changed  {name}: removed or overwritten while it was read")
                continue
        # What can't be read is not known to be damaged, nor to be intact.
        is_newer = isinstance(each.error, FormatVersionError)
        word = f"NEWER    {name}: it needs a newer release" if is_newer else f"DAMAGED  {name}"
        say(f"{word}: {printable(damage)}" if damage else f"intact   {name}")
        intact = intact and not damage
    return intact


def _wanted(store: Store, wanted: str | None) -> list[Found]:
    if wanted is None:
        found = checkpoints(store)
    elif wanted == ids.LATEST:
        found = checkpoints(store)
        meant = latest(found)
        found = [each for each in found if meant is not None and each.name == meant.name]
    else:
        found = [each for each in [read(store, wanted)] if each.is_there]
    if not found:
        # Who meant another place must not take this for good news.
        text = f"no such checkpoint: {wanted}" if wanted is not None else "no checkpoint to verify"
        raise CheckpointNotFoundError(
            text, operation="verify", tier="durable", key=store.url, hint="list what is there: tiered-ckpt ls"
        )
    return found


def _damage(store: Store, manifest: Manifest) -> str:
    """What is wrong with a checkpoint whose bytes match none of its contents; else "".

    Raises:
        StoreError: The tier could not be asked, which says nothing of the checkpoint.
    """
    first = ""
    for content in (manifest.content, *manifest.previous):
        try:
            for entry in files_of(store, content).all():
                _verify_file(store, entry)
        except (CorruptCheckpointError, ManifestError, StoreNotFoundError) as error:
            first = first or str(error)
        else:
            return ""
    return first


def _verify_file(store: Store, entry: FileEntry) -> None:
    size = store.size(entry.path)
    if size != entry.size:
        raise CorruptCheckpointError(
            f"{size} bytes in place of {entry.size}", operation="verify", tier="durable", key=entry.path
        )
    buffer = memoryview(bytearray(min(entry.size, entry.chunk_size)))
    for index, (offset, length) in enumerate(entry.chunks):
        for start in range(0, length, _PIECE):
            with buffer[start : min(start + _PIECE, length)] as piece:
                store.read_into(entry.path, offset + start, piece)
        with buffer[:length] as chunk:
            entry.check_chunk(index, chunk, tier="durable", where=entry.path)
