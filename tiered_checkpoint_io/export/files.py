"""A sharded checkpoint as one torch.save file, or as safetensors, streamed through a few megabytes."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from tiered_checkpoint_io.errors import ExportError, TieredCheckpointError
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.export.items import Items
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.model.manifest import METADATA

_ALIGNMENT = 64
#: The names of element types in safetensors.
_SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
#: Where Lightning's sharded strategies keep the model.
_MODEL_PREFIX = "state_dict."
#: As Hugging Face's libraries have it.
DEFAULT_SHARD_SIZE = 5 * 10**9


def open_items(folder: Folder) -> Items:
    """What a folder of torch.distributed.checkpoint holds.

    Raises:
        CheckpointNotFoundError: It has no ``.metadata``.
        CorruptCheckpointError: That file is damaged.
    """
    size = folder.size(METADATA)
    data = folder.read(METADATA, 0, size)
    return Items(folder, parse_metadata(data, tier="durable", where=f"{folder.where}/{METADATA}"))


def to_torch_file(folder: Folder, target: str | os.PathLike[str], *, weights_only: bool = True) -> None:
    """Writes the whole state as ``torch.save`` would have.

    Args:
        folder: The sharded checkpoint.
        target: The file to write; it must not exist.
        weights_only: Refuse objects that are neither tensors nor plain data.

    Raises:
        ExportError: ``target`` exists, or can't be written.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    target = Path(target)
    items = open_items(folder)
    with _new_file(target) as descriptor, _placeholders(items, target.parent) as (tensors, lend):
        flat: dict[str, Any] = {
            name: tensors[name] if name in tensors else items.value(name, weights_only=weights_only)
            for name in items.entries
        }
        state = flat if items.paths is None else unflatten_state_dict(flat, items.paths)
        image = plan(state)
        if not image.planned:
            # Then by way of the placeholders' own file.
            for name in tensors:
                lend(name)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                torch.save(state, file)
            return
        names = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor.numel()}
        os.ftruncate(descriptor, image.size)
        for segment in image.segments:
            os.pwrite(descriptor, segment.data, segment.offset)
        for region in image.regions:
            source = names.get(region.storage.data_ptr())
            if source is not None:
                items.copy(source, descriptor, region.offset)
            else:
                os.pwrite(descriptor, _content(region.storage), region.offset)


def to_safetensors(
    folder: Folder,
    target: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
) -> list[Path]:
    """Writes tensors as Hugging Face's libraries expect them: shards and an index, or one file.

    Args:
        folder: The sharded checkpoint.
        target: The folder to write to; made if need be.
        prefix: Which tensors: those whose names begin with it, named without it. By default
            ``state_dict.``, where Lightning keeps the model, or all where there is no such name.
        max_shard_size: Bytes of tensors in one file; a larger tensor gets a file of its own.

    Returns:
        The files that were written.

    Raises:
        ExportError: No tensor has the prefix, an element type has no name there, or a file
            exists or can't be written.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    target = Path(target)
    items = open_items(folder)
    tensors = _named(items, prefix, folder)
    shards = _split(tensors, items, max_shard_size)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(target, error) from error
    files: list[Path] = []
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = target / (
            f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        header, offsets = _header(shard, items)
        with _new_file(file) as descriptor:
            os.pwrite(descriptor, header, 0)
            for name, source in shard.items():
                items.copy(source, descriptor, len(header) + offsets[name])
        files.append(file)
        places.update(dict.fromkeys(shard, file.name))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_nbytes(items, source) for source in tensors.values())},
            "weight_map": places,
        }
        # Written last: where it is, all files that it names are.
        file = target / "model.safetensors.index.json"
        with _new_file(file) as descriptor:
            os.pwrite(descriptor, json.dumps(index, indent=2, sort_keys=True).encode(), 0)
        files.append(file)
    return files


# ----------------------------------------------------------------------------------- torch's file
@contextlib.contextmanager
def _placeholders(items: Items, where: Path) -> Iterator[tuple[dict[str, torch.Tensor], Callable[[str], None]]]:
    """Tensors of the right shapes over a file with no content: they take no memory until touched.

    And what copies a tensor's elements into that file.
    """
    places: dict[str, int] = {}
    end = 0
    for name in items.entries:
        if items.tensor(name) is not None:
            places[name] = end
            end += -(-_nbytes(items, name) // _ALIGNMENT) * _ALIGNMENT
    tensors: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryFile(dir=where) as file:
        file.truncate(max(end, 1))
        # Unmapped with the last tensor.
        mapping = mmap.mmap(file.fileno(), max(end, 1))
        for name, offset in places.items():
            entry = items.tensor(name)
            assert entry is not None
            nbytes = _nbytes(items, name)
            if nbytes:
                raw = torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=nbytes)
                tensors[name] = raw.view(entry.properties.dtype).view(entry.size)
            else:
                tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        yield tensors, lambda name: items.copy(name, file.fileno(), places[name])


def _content(storage: torch.UntypedStorage) -> Any:
    content: Any = torch.empty(0, dtype=torch.uint8)
    return content.set_(storage).numpy()


# ------------------------------------------------------------------------------------ safetensors
def _named(items: Items, prefix: str | None, folder: Folder) -> dict[str, str]:
    """The names to write, and whose elements they are."""
    names = [name for name in items.entries if items.tensor(name) is not None]
    if prefix is None:
        prefix = _MODEL_PREFIX if any(name.startswith(_MODEL_PREFIX) for name in names) else ""
    found = {name.removeprefix(prefix): name for name in names if name.startswith(prefix) and name != prefix}
    if not found:
        heads = sorted({name.partition(".")[0] for name in names})
        raise ExportError(
            f"no tensor's name begins with {prefix!r}",
            operation="export",
            tier="durable",
            key=folder.where,
            hint=f"names begin with: {', '.join(heads[:20]) or 'nothing, there are no tensors'}",
        )
    return found


def _split(tensors: Mapping[str, str], items: Items, max_shard_size: int) -> list[dict[str, str]]:
    if max_shard_size < 1:
        raise ExportError(
            f"max_shard_size is {max_shard_size}", operation="export", hint="allowed: bytes, a whole number from 1"
        )
    shards: list[dict[str, str]] = [{}]
    size = 0
    for name, source in tensors.items():
        nbytes = _nbytes(items, source)
        if shards[-1] and size + nbytes > max_shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = source
        size += nbytes
    return shards


def _header(shard: Mapping[str, str], items: Items) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a safetensors file, and where behind them each tensor begins."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, source in shard.items():
        entry = items.tensor(source)
        assert entry is not None
        dtype = _SAFETENSORS.get(entry.properties.dtype)
        if dtype is None:
            raise ExportError(
                f"safetensors has no name for {entry.properties.dtype}, the element type of {source!r}",
                operation="export",
                hint="export to a torch file, or choose other tensors by prefix",
            )
        offsets[name], end = end, end + _nbytes(items, source)
        described[name] = {"dtype": dtype, "shape": list(entry.size), "data_offsets": [offsets[name], end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets


# ----------------------------------------------------------------------------------------- common
def _nbytes(items: Items, name: str) -> int:
    entry = items.tensor(name)
    assert entry is not None
    return math.prod(entry.size) * entry.properties.dtype.itemsize


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[int]:
    """A file that has its name only once it is complete, and on disk."""
    begun = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "it exists already")
        descriptor = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
            begun.rename(target)
        finally:
            os.close(descriptor)
            begun.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, TieredCheckpointError):
            raise
        raise _not_written(target, error) from error


def _not_written(target: Path, error: OSError) -> ExportError:
    return ExportError(
        f"{target} can't be written: {error.strerror or error}",
        operation="export",
        key=str(target),
        hint="give a new name, in a folder with enough room",
    )
