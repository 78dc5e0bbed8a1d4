"""A checkpoint of a durable tier, or any folder of torch.distributed.checkpoint, as files for others."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tiered_checkpoint_io.engine.chunks import fetch, fetch_chunk, unverified
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import read_all, read_manifest
from tiered_checkpoint_io.engine.restore.choice import Catalog, Selector, choose
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatVersionError,
    ManifestError,
    OtherKindError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.export.files import (
    DEFAULT_SHARD_SIZE,
    new_file,
    not_written,
    to_safetensors,
    to_torch_file,
    write_safetensors,
)
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.export.state import State
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Manifest
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
    """Writes a full or sharded checkpoint as one torch file, or as safetensors, through a few megabytes of memory.

    Every byte of a checkpoint of ours is verified on the way. The safetensors of a full checkpoint need room for its
    file below ``target``, while they are written.

    Args:
        dirpath: The durable tier.
        name: The checkpoint's name there, also of a folder that plain DCP wrote, or a file of torch.save;
            ``tiered:latest`` for the latest save that training can resume from.
        target: The file to write (``torch``), or the folder (``safetensors``); local.
        format: ``torch``: the whole state, as ``torch.save`` would have written it; of a full checkpoint, its
            file. ``safetensors``: the tensors below ``prefix``, as Hugging Face's libraries read them.
        prefix: For ``safetensors``: which tensors, named without it. By default ``state_dict.``, where
            Lightning keeps the model, or all where there is no such name.
        max_shard_size: For ``safetensors``: bytes of tensors in one file.
        weights_only: Refuse objects that are neither tensors nor plain data; a full checkpoint's file is copied
            without a look at them.
        options: Keys of the configuration: ``endpoint_url``, ``region``, ``profile`` ...

    Returns:
        The files that were written.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        OtherKindError: It is a local one.
        CorruptCheckpointError: Its bytes are not those that were saved.
        ExportError: ``target`` exists, or can't be written.
        StoreError: The durable tier could not be read.
    """
    if format not in ("torch", "safetensors"):
        raise ConfigError(f"format is {format!r}", hint="allowed: torch, safetensors")
    store = open_store(TieredCheckpointConfig.from_any(dirpath=dirpath, **options))
    target = Path(target)
    try:
        found = _find(store, name)
        if isinstance(found, Folder):
            if format == "safetensors":
                return to_safetensors(found, target, prefix=prefix, max_shard_size=max_shard_size)
            to_torch_file(found, target, weights_only=weights_only)
        elif format == "safetensors":
            with _scratch(target) as folder:
                _copy(store, found, folder / "checkpoint")
                where = ids.join_url(store.url, found[0].path)
                state = State(folder / "checkpoint", where, weights_only=weights_only)
                return write_safetensors(state, target, prefix=prefix, max_shard_size=max_shard_size)
        else:
            _copy(store, found, target)
        return [target]
    finally:
        store.close()


def _find(store: Store, name: str) -> Folder | list[FileEntry]:
    """The folder of a sharded checkpoint; of a full one, what its file may be, the newest first."""
    manifest = _latest(store) if name == ids.LATEST else read_manifest(store, ids.validate_name(name))
    if manifest is not None and manifest.alias_of is not None:
        manifest = read_manifest(store, manifest.alias_of) or manifest
    if manifest is None:
        return _plain(store, name)
    # While an overwrite is under way, its objects may still be those of the content before.
    contents = (manifest.content, *manifest.previous)
    kind = manifest.content.kind
    if kind == "sharded":
        intact = (each for each in contents if _is_current(store, each)) if manifest.previous else iter(())
        return Folder(store, manifest.name, files_of(store, next(intact, manifest.content)).all())
    if kind == "local":
        raise OtherKindError(
            f"{manifest.name} is a local checkpoint, each rank's state by itself",
            operation="export",
            key=ids.join_url(store.url, manifest.name),
            hint="load it by tiered_checkpoint_io.dcp with kind='local', and save it by dcp.save_full",
        )
    return [entry for each in contents if each.kind == "full" for entry in files_of(store, each).all()]


def _copy(store: Store, entries: list[FileEntry], target: Path) -> None:
    """Copies the first file whose bytes match; raises the first error where none does."""
    errors: list[TieredCheckpointError] = []
    for entry in entries:
        try:
            with new_file(target, entry.size) as mapping:
                size = store.size(entry.path)
                if size != entry.size:
                    text = f"{size} bytes in place of {entry.size}"
                    raise CorruptCheckpointError(text, operation="export", tier="durable", key=entry.path)
                for index, (offset, length) in enumerate(entry.chunks):
                    with memoryview(mapping) as view, view[offset : offset + length] as chunk:
                        fetch_chunk(store, entry, index, chunk)
                    # Written pages count as the process's own for no longer than that.
                    mapping.madvise(mmap.MADV_DONTNEED)
            return
        except (CorruptCheckpointError, StoreNotFoundError) as error:
            errors.append(error)
    raise errors[0]


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder within the target, for as long as the block runs; a target that is made for it goes if it fails."""
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".export-", dir=target)
    except OSError as error:
        raise not_written(target, error) from error
    try:
        with made as folder:
            yield Path(folder)
    finally:
        if is_new:
            # Succeeds only where nothing was written.
            with contextlib.suppress(OSError):
                target.rmdir()


def _is_current(store: Store, content: Content) -> bool:
    """Whether the file that changes over last is that of a content, and the description of it is intact."""
    try:
        entry = files_of(store, content).entry(METADATA)
        if entry is not None:
            fetch(store, entry, memoryview(bytearray(entry.size)), concurrency=1)
    except (CorruptCheckpointError, StoreNotFoundError):
        return False
    return entry is not None


def _plain(store: Store, name: str) -> Folder | list[FileEntry]:
    """What others wrote under a name: a folder, or one file."""
    folder = Folder(store, name)
    found: Folder | list[FileEntry] = folder
    try:
        folder.size(METADATA)
    except FileNotFoundError:
        try:
            found = [unverified(name, store.size(name))]
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no checkpoint {name!r}", operation="export", key=store.url, hint="see `tiered-ckpt ls`"
            ) from error
    _log.warning("%s has no manifest: nothing verifies it", folder.where)
    return found


def _latest(store: Store) -> Manifest:
    """What a restart would take of this tier; local checkpoints are loaded by other means."""
    manifests = read_all(store, _readable)
    candidates = choose(Catalog({}, manifests), Selector("latest"), "sharded")
    found = next((each for each in manifests if candidates and each.name == candidates[0].name), None)
    if found is None:
        raise CheckpointNotFoundError(
            "no checkpoint that training can resume from",
            operation="export",
            key=store.url,
            hint="name another one: see `tiered-ckpt ls`",
        )
    return found


def _readable(store: Store, name: str) -> Manifest | None:
    try:
        return read_manifest(store, name)
    except FormatVersionError:
        # It may be the latest.
        raise
    except ManifestError as error:
        _log.warning("skipping this checkpoint: %s", error)
        return None
