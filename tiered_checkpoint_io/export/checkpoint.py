"""A sharded checkpoint of a durable tier, or any folder of torch.distributed.checkpoint, as files for others."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Literal

from tiered_checkpoint_io.engine.chunks import fetch
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import read_all, read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    OtherKindError,
    StoreNotFoundError,
)
from tiered_checkpoint_io.export.files import DEFAULT_SHARD_SIZE, to_safetensors, to_torch_file
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import METADATA, Content, Manifest
from tiered_checkpoint_io.stores import Store, open_store

Format = Literal["torch", "safetensors"]

_log = logging.getLogger("tiered_checkpoint_io.export")


def export_checkpoint(
    dirpath: str | os.PathLike[str],
    name: str,
    target: str | os.PathLike[str],
    *,
    format: Format = "torch",  # noqa: A002 - the word that users know
    prefix: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    weights_only: bool = True,
    **options: Any,
) -> list[Path]:
    """Writes a sharded checkpoint as one torch file, or as safetensors, through a few megabytes of memory.

    Every byte of a checkpoint of ours is verified on the way.

    Args:
        dirpath: The durable tier.
        name: The checkpoint's name there, also of a folder that plain DCP wrote; ``tiered:latest`` for
            the newest.
        target: The file to write (``torch``), or the folder (``safetensors``); local.
        format: ``torch``: the whole state, as ``torch.save`` would have written it. ``safetensors``: the
            tensors below ``prefix``, as Hugging Face's libraries read them.
        prefix: For ``safetensors``: which tensors, named without it. By default ``state_dict.``, where
            Lightning keeps the model, or all where there is no such name.
        max_shard_size: For ``safetensors``: bytes of tensors in one file.
        weights_only: For ``torch``: refuse objects that are neither tensors nor plain data.
        options: Keys of the configuration: ``endpoint_url``, ``region``, ``profile`` ...

    Returns:
        The files that were written.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        OtherKindError: It is a full one, and needs no export.
        CorruptCheckpointError: Its bytes are not those that were saved.
        ExportError: ``target`` exists, or can't be written.
        StoreError: The durable tier could not be read.
    """
    if format not in ("torch", "safetensors"):
        raise ConfigError(f"format is {format!r}", hint="allowed: torch, safetensors")
    store = open_store(TieredCheckpointConfig.from_any(dirpath=dirpath, **options))
    try:
        folder = _folder(store, name)
        if format == "safetensors":
            return to_safetensors(folder, target, prefix=prefix, max_shard_size=max_shard_size)
        to_torch_file(folder, target, weights_only=weights_only)
        return [Path(target)]
    finally:
        store.close()


def _folder(store: Store, name: str) -> Folder:
    manifest = _newest(store) if name == ids.LATEST else read_manifest(store, ids.validate_name(name))
    if manifest is not None and manifest.alias_of is not None:
        manifest = read_manifest(store, manifest.alias_of) or manifest
    if manifest is None:
        return _plain(store, name)
    if manifest.content.kind != "sharded":
        raise OtherKindError(
            f"{manifest.name} is a {manifest.content.kind} checkpoint",
            operation="export",
            key=ids.join_url(store.url, manifest.name),
            hint="torch.load reads a full checkpoint's file as it is",
        )
    # While an overwrite is under way, its objects may still be those of the content before.
    contents = (manifest.content, *manifest.previous) if manifest.previous else ()
    intact = (each for each in contents if _is_current(store, each))
    return Folder(store, manifest.name, files_of(store, next(intact, manifest.content)).all())


def _is_current(store: Store, content: Content) -> bool:
    """Whether the file that changes over last is that of a content, and the description of it is intact."""
    try:
        entry = files_of(store, content).entry(METADATA)
        if entry is not None:
            fetch(store, entry, memoryview(bytearray(entry.size)), concurrency=1)
    except (CorruptCheckpointError, StoreNotFoundError):
        return False
    return entry is not None


def _plain(store: Store, name: str) -> Folder:
    folder = Folder(store, name)
    try:
        folder.size(METADATA)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"no sharded checkpoint {name!r}", operation="export", key=store.url, hint="see `tiered-ckpt ls`"
        ) from error
    _log.warning("%s has no manifest: nothing verifies it", folder.where)
    return folder


def _newest(store: Store) -> Manifest:
    manifests = (each for each in read_all(store, read_manifest) if each is not None and each.alias_of is None)
    sharded = [manifest for manifest in manifests if manifest.content.kind == "sharded"]
    if not sharded:
        raise CheckpointNotFoundError("no sharded checkpoint", operation="export", key=store.url)
    return max(sharded, key=lambda manifest: manifest.content.save_id)
