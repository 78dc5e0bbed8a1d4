"""A checkpoint of a durable tier, or any folder of torch.distributed.checkpoint, as files for others."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.export.files import DEFAULT_SHARD_SIZE, not_written, to_safetensors, to_torch_file
from tiered_checkpoint_io.export.find import SourceCheckpoint, copy_file, read_found
from tiered_checkpoint_io.export.items import Items
from tiered_checkpoint_io.export.state import MappedState
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

Format = Literal["torch", "safetensors"]


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
        StoreError: The durable tier could not be read; or a run removed or overwrote it, each time that it was read.
    """
    if format not in ("torch", "safetensors"):
        raise ConfigError(f"format is {format!r}", hint="allowed: torch, safetensors")
    target = Path(target)
    with contextlib.closing(open_store(TieredCheckpointConfig.from_any(dirpath=dirpath, **options))) as store:

        def work(found: SourceCheckpoint) -> list[Path]:
            if found.folder is not None:
                if format == "safetensors":
                    return to_safetensors(Items(found.folder), target, prefix=prefix, max_shard_size=max_shard_size)
                to_torch_file(found.folder, target, weights_only=weights_only)
            elif format == "safetensors":
                with _scratch(target) as folder:
                    copy_file(store, found, folder / "checkpoint", operation="export", synced=False)
                    where = ids.join_url(store.url, found.name)
                    state = MappedState(folder / "checkpoint", where, weights_only=weights_only)
                    # It is mapped: a kill leaves no copy of the checkpoint behind.
                    (folder / "checkpoint").unlink()
                    return to_safetensors(state, target, prefix=prefix, max_shard_size=max_shard_size)
            else:
                copy_file(store, found, target, operation="export")
            return [target]

        return read_found(store, name, work, operation="export")


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
