"""Finds what a name means on a durable tier: a full or sharded checkpoint of ours, or a folder or file of others."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tiered_checkpoint_io.engine.chunks import fetch_chunk, unverified
from tiered_checkpoint_io.engine.durable.damage import contents_there
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OtherKindError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.export.files import new_file
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.inventory import durable
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Manifest
from tiered_checkpoint_io.stores import Store

_log = logging.getLogger("tiered_checkpoint_io.export")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A full or sharded checkpoint.

    Attributes:
        name: The checkpoint's; of an alias, that of its target.
        folder: A sharded one; None for a full one.
        copies: Of a full one, what its file may be, the newest first; of a sharded one, its facts.
            The content is None where others wrote it.
        manifest: What it was found by; None where others wrote it.
    """

    name: str
    folder: Folder | None
    copies: tuple[tuple[Content | None, tuple[FileEntry, ...]], ...]
    manifest: Manifest | None = None


def find(store: Store, name: str, *, operation: str) -> SourceCheckpoint:
    """A checkpoint by its name, ``tiered:latest``, or the path of a folder or file that others wrote.

    Raises:
        CheckpointNotFoundError: There is none.
        OtherKindError: It is a local one.
        CorruptCheckpointError: Its description is damaged.
        StoreError: The durable tier could not be read.
    """
    if name != ids.LATEST:
        name = ids.validate_name(name)
    # Local checkpoints are loaded by other means.
    manifest = durable.find(store, name, operation=operation, accepts="sharded")
    if manifest is None:
        return _plain(store, name, operation)
    contents = contents_there(store, manifest)
    kind = contents[0].kind
    if kind == "sharded":
        content = contents[0]
        files = files_of(store, content).all()
        return SourceCheckpoint(manifest.name, Folder(store, manifest.name, files), ((content, files),), manifest)
    if kind == "local":
        raise OtherKindError(
            f"{manifest.name} is a local checkpoint, each rank's state by itself",
            operation=operation,
            key=ids.join_url(store.url, manifest.name),
            hint="load it by tiered_checkpoint_io.dcp with kind='local', and save it by dcp.save_full",
        )
    full = [(each, files_of(store, each).all()) for each in contents if each.kind == "full"]
    return SourceCheckpoint(manifest.name, None, tuple(full), manifest)


def read_found(store: Store, name: str, work: Callable[[SourceCheckpoint], _T], *, operation: str) -> _T:
    """Does what reads a checkpoint, found as by :func:`find`; see :func:`durable.read_unchanged`."""

    def look() -> tuple[Manifest | None, SourceCheckpoint]:
        found = find(store, name, operation=operation)
        return found.manifest, found

    return durable.read_unchanged(store, look, work, operation=operation)


def copy_file(store: Store, found: SourceCheckpoint, target: Path, *, operation: str, synced: bool = True) -> None:
    """Copies the file of a full checkpoint: the first whose bytes match; ``synced`` see :func:`new_files`.

    Raises:
        CorruptCheckpointError: None matches.
        StoreError: The durable tier could not be read.
        ExportError: ``target`` exists, or can't be written.
    """
    errors: list[TieredCheckpointError] = []
    for _, (entry, *_) in found.copies:
        try:
            with new_file(target, entry.size, synced=synced) as mapping:
                size = store.size(entry.path)
                if size != entry.size:
                    text = f"{size} bytes in place of {entry.size}"
                    raise CorruptCheckpointError(text, operation=operation, tier="durable", key=entry.path)
                for index, (offset, length) in enumerate(entry.chunks):
                    with memoryview(mapping) as view, view[offset : offset + length] as chunk:
                        fetch_chunk(store, entry, index, chunk)
                    # Written pages count as the process's own for no longer than that.
                    mapping.madvise(mmap.MADV_DONTNEED)
            return
        except (CorruptCheckpointError, StoreNotFoundError) as error:
            errors.append(error)
    raise errors[0]


def _plain(store: Store, name: str, operation: str) -> SourceCheckpoint:
    """What others wrote under a name: a folder, or one file."""
    folder = Folder(store, name)
    found = SourceCheckpoint(name, folder, ())
    try:
        folder.size(METADATA)
    except FileNotFoundError:
        try:
            found = SourceCheckpoint(name, None, ((None, (unverified(name, store.size(name)),)),))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no checkpoint {name!r}", operation=operation, key=store.url, hint="see `tiered-ckpt ls`"
            ) from error
    _log.warning("%s has no manifest: nothing verifies it", folder.where)
    return found
