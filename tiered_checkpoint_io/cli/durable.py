"""Commands over a durable tier: list, verify, export."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.options import Endpoint
from tiered_checkpoint_io.cli.output import show
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidNameError,
    ManifestError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import gib
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import FileEntry, Manifest
from tiered_checkpoint_io.stores import Store, open_store


def list_durable(dirpath: str, endpoint_url: Endpoint = None) -> None:
    """Lists the checkpoints of a durable tier."""
    store = _store(dirpath, endpoint_url)
    rows: list[tuple[str, ...]] = []
    damaged = False
    for name in _names(store):
        try:
            manifest = read_manifest(store, name)
        except (ManifestError, InvalidNameError) as error:
            # The others are there all the same.
            damaged = True
            rows.append((name, "?", "?", "?", f"damaged: {error}"))
            continue
        if manifest is not None:
            content = manifest.content
            created = datetime.fromtimestamp(content.created, timezone.utc).isoformat(timespec="seconds")
            rows.append((name, str(content.step), gib(content.size), created, manifest.alias_of or ""))
    show(store.url, rows, "name", "step", "size", "created", "alias of")
    raise typer.Exit(1 if damaged else 0)


def verify_durable(
    dirpath: str, name: Annotated[str | None, typer.Argument()] = None, endpoint_url: Endpoint = None
) -> None:
    """Reads checkpoints of a durable tier and compares every byte with its hash."""
    store = _store(dirpath, endpoint_url)
    bad = 0
    chosen = [ids.name_in(ids.normalize_dirpath(dirpath), name)] if name else _names(store)
    if not chosen:
        # Whoever meant another place must not take this for good news.
        raise CheckpointNotFoundError("no checkpoint to verify", operation="verify", tier="durable", key=store.url)
    for each in chosen:
        try:
            manifest = read_manifest(store, each)
            if manifest is None:
                raise CheckpointNotFoundError("no such checkpoint", tier="durable", key=each)
            if manifest.alias_of and (target := read_manifest(store, manifest.alias_of)) is not None:
                manifest = target
            _verify(store, manifest)
            typer.echo(f"intact   {each}")
        except TieredCheckpointError as error:
            bad += 1
            typer.echo(f"DAMAGED  {each}: {error}")
    raise typer.Exit(1 if bad else 0)


def export_durable(
    dirpath: str,
    name: str,
    target: Path,
    file_format: Annotated[str, typer.Option("--format", help="torch (one file) or safetensors (a folder).")] = "torch",
    prefix: Annotated[
        str | None, typer.Option(help="For safetensors: of the tensors' names; 'state_dict.' by default.")
    ] = None,
    max_shard_size: Annotated[int, typer.Option(help="For safetensors: bytes of one file.")] = 5 * 10**9,
    trust: Annotated[bool, typer.Option(help="For torch: allow objects that may run code when loaded.")] = False,
    endpoint_url: Endpoint = None,
) -> None:
    """Writes a sharded checkpoint (its NAME, or tiered:latest) as files for others, in little memory."""
    from tiered_checkpoint_io.export import export_checkpoint

    written = export_checkpoint(
        dirpath,
        name,
        target,
        format=file_format,  # type: ignore[arg-type]
        prefix=prefix,
        max_shard_size=max_shard_size,
        weights_only=not trust,
        endpoint_url=endpoint_url,
    )
    for file in written:
        typer.echo(f"{file}: {gib(file.stat().st_size)}")


def _store(dirpath: str, endpoint_url: str | None) -> Store:
    return open_store(TieredCheckpointConfig.from_any(dirpath=dirpath, endpoint_url=endpoint_url))


def _names(store: Store) -> list[str]:
    found = (ids.name_from_manifest_key(entry.key) for entry in store.list(ids.MANIFEST_PREFIX))
    return sorted(name for name in found if name is not None)


def _verify(store: Store, manifest: Manifest) -> None:
    """Raises the error of a checkpoint's newest content where its bytes match no content at all."""
    first: TieredCheckpointError | None = None
    for content in (manifest.content, *manifest.previous):
        try:
            for entry in files_of(store, content).all():
                _verify_file(store, entry)
        except TieredCheckpointError as error:
            first = first or error
        else:
            return
    assert first is not None
    raise first


def _verify_file(store: Store, entry: FileEntry) -> None:
    size = store.size(entry.path)
    if size != entry.size:
        raise CorruptCheckpointError(
            f"{size} bytes in place of {entry.size}", operation="verify", tier="durable", key=entry.path
        )
    buffer = memoryview(bytearray(min(entry.size, entry.chunk_size)))
    for index, (offset, length) in enumerate(entry.chunks):
        with buffer[:length] as chunk:
            store.read_into(entry.path, offset, chunk)
            entry.check_chunk(index, chunk, tier="durable", where=entry.path)
