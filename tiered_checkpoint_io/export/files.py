"""A sharded checkpoint as one torch.save file, or as safetensors, streamed through a few megabytes."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from tiered_checkpoint_io.errors import ExportError, TieredCheckpointError
from tiered_checkpoint_io.export.blocks import TargetBlock, whole
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.export.items import Items, Tensors
from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.formats.shard_image import untouched
from tiered_checkpoint_io.stores.silence import local_work

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
#: How a file system says that it has no files without names; the kernels before it say that a folder is one.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
#: Where Lightning's sharded strategies keep the model.
_MODEL_PREFIX = "state_dict."
#: As Hugging Face's libraries have it.
DEFAULT_SHARD_SIZE = 5 * 10**9


def to_torch_file(
    folder: Folder,
    target: str | os.PathLike[str],
    *,
    weights_only: bool = True,
) -> None:
    """Writes the whole state as ``torch.save`` would have; see :func:`export_checkpoint`.

    Args:
        folder: The checkpoint.
        target: The file; it must not exist.
        weights_only: See :func:`export_checkpoint`.
    """
    items = Items(folder)
    tensors = {name: _placeholder(items, name) for name in items.tensors}
    flat: dict[str, Any] = {
        name: tensors[name] if name in tensors else items.value(name, weights_only=weights_only)
        for name in items.entries
    }
    state = flat if items.paths is None else unflatten_state_dict(flat, items.paths)
    image = plan(state)
    if not image.planned:
        # Then torch.save has written their elements, too: once more, with those of the checkpoint.
        for name, tensor in tensors.items():
            if tensor.numel():
                content = mmap.mmap(-1, tensor.nbytes)
                items.fill({name: [TargetBlock(whole(tensor.size()), content, 0)]})
                tensor.copy_(torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape))
        image = plan(state)
    names = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor.numel()}
    with new_file(Path(target), image.size) as mapping:
        for segment in image.segments:
            mapping[segment.offset : segment.offset + len(segment.data)] = segment.data
        targets: dict[str, list[TargetBlock]] = {}
        for region in image.regions:
            source = names.get(region.storage.data_ptr())
            if source is not None:
                targets[source] = [TargetBlock(whole(items.tensors[source].size), mapping, region.offset)]
            else:
                other: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
                mapping[region.offset : region.offset + region.nbytes] = other.set_(region.storage).numpy()
        items.fill(targets)


def to_safetensors(
    items: Tensors,
    target: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
) -> list[Path]:
    """Writes tensors as Hugging Face's libraries expect them: shards and an index, or one file.

    See :func:`export_checkpoint`; a tensor larger than ``max_shard_size`` gets a file of its own.
    """
    target = Path(target)
    tensors = _named(items, prefix)
    shards = _split(tensors, items, max_shard_size)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(target, error) from error
    # Beside files of an earlier export, readers would take some of each.
    for earlier in (*target.glob("model*.safetensors"), *target.glob("model.safetensors.index.json")):
        raise not_written(earlier, FileExistsError(errno.EEXIST, "it exists already"))
    files: list[Path] = []
    try:
        _write_safetensors(tensors, shards, items, target, files)
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise
    return files


def _write_safetensors(
    tensors: Mapping[str, str], shards: list[dict[str, str]], items: Tensors, target: Path, files: list[Path]
) -> None:
    """Writes the shards, and the index that leads to them; ``files`` gets each that is complete."""
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = target / (
            f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        header, offsets, size = _header(shard, items)
        with new_file(file, size) as mapping:
            mapping[: len(header)] = header
            base = len(header)
            items.fill(
                {
                    source: [TargetBlock(whole(items.tensors[source].size), mapping, base + offsets[name])]
                    for name, source in shard.items()
                }
            )
        files.append(file)
        places.update(dict.fromkeys(shard, file.name))
    if len(shards) > 1:
        total = sum(items.nbytes(source) for source in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        # Written last: where it is, all files that it names are.
        file = target / "model.safetensors.index.json"
        text = json.dumps(index, indent=2, sort_keys=True).encode()
        with new_file(file, len(text)) as mapping:
            mapping[:] = text
        files.append(file)


# ----------------------------------------------------------------------------------- torch's file
def _placeholder(items: Items, name: str) -> torch.Tensor:
    """A tensor of this shape, for its place in the file alone."""
    entry = items.tensors[name]
    return untouched(items.nbytes(name)).view(entry.properties.dtype).view(entry.size)


# ------------------------------------------------------------------------------------ safetensors
def _named(items: Tensors, prefix: str | None) -> dict[str, str]:
    """The names to write, and whose elements they are."""
    names = list(items.tensors)
    if prefix is None:
        prefix = _MODEL_PREFIX if any(name.startswith(_MODEL_PREFIX) for name in names) else ""
    found = {name.removeprefix(prefix): name for name in names if name.startswith(prefix) and name != prefix}
    if not found:
        heads = sorted({name.partition(".")[0] for name in names})
        raise ExportError(
            f"no tensor's name begins with {prefix!r}",
            operation="export",
            tier="durable",
            key=items.where,
            hint=f"names begin with: {', '.join(heads[:20]) or 'nothing, there are no tensors'}",
        )
    return found


def _split(tensors: Mapping[str, str], items: Tensors, max_shard_size: int) -> list[dict[str, str]]:
    if max_shard_size < 1:
        raise ExportError(
            f"max_shard_size is {max_shard_size}", operation="export", hint="allowed: bytes, a whole number from 1"
        )
    shards: list[dict[str, str]] = [{}]
    size = 0
    for name, source in tensors.items():
        nbytes = items.nbytes(source)
        if shards[-1] and size + nbytes > max_shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = source
        size += nbytes
    return shards


def _header(shard: Mapping[str, str], items: Tensors) -> tuple[bytes, dict[str, int], int]:
    """The first bytes of a safetensors file, the offset of each tensor from their end, and the size of the file."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, source in shard.items():
        entry = items.tensors[source]
        dtype = _SAFETENSORS.get(entry.properties.dtype)
        if dtype is None:
            raise ExportError(
                f"safetensors has no name for {entry.properties.dtype}, the element type of {source!r}",
                operation="export",
                hint="export to a torch file, or choose other tensors by prefix",
            )
        offsets[name], end = end, end + items.nbytes(source)
        described[name] = {"dtype": dtype, "shape": list(entry.size), "data_offsets": [offsets[name], end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, offsets, len(header) + end


# ----------------------------------------------------------------------------------------- common
@contextlib.contextmanager
def new_file(target: Path, size: int, *, synced: bool = True) -> Iterator[mmap.mmap]:
    """One file, as :func:`new_files` gives it."""
    with new_files([(target, size)], synced=synced) as (mapping,):
        yield mapping


@contextlib.contextmanager
def new_files(targets: Sequence[tuple[Path, int]], *, synced: bool = True) -> Iterator[list[mmap.mmap]]:
    """Mapped files that get their names, in this order, once all are complete; a kill before leaves nothing of them.

    Args:
        targets: Paths and sizes.
        synced: Whether they are on disk before they have names; not for what is removed right after.

    Raises:
        ExportError: One exists, or can't be written; then none gets its name.
    """
    with contextlib.ExitStack() as held:
        with local_work():
            files = [held.enter_context(contextlib.closing(_NewFile(*each))) for each in targets]
        with _writing(targets[0][0]) if targets else contextlib.nullcontext():
            yield [each.mapped() for each in files]
        with local_work():
            for each in files:
                each.complete(synced=synced)
            named: list[Path] = []
            try:
                for each in files:
                    each.name()
                    named.append(each.target)
            except BaseException:
                for path in named:
                    path.unlink(missing_ok=True)
                raise


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, TieredCheckpointError):
            raise
        raise not_written(target, error) from error


class _NewFile:
    """A file that has no name yet; each method raises ExportError."""

    def __init__(self, target: Path, size: int) -> None:
        self.target, self._size = target, size
        with _writing(target):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "it exists already")
            self._descriptor, self._begun = _begin(target)
            try:
                # A mapped page without space would end the process when it is touched.
                os.posix_fallocate(self._descriptor, 0, max(size, 1))
            except BaseException:
                self.close()
                raise

    def mapped(self) -> mmap.mmap:
        with _writing(self.target):
            return mmap.mmap(self._descriptor, max(self._size, 1))

    def complete(self, *, synced: bool) -> None:
        with _writing(self.target):
            if not self._size:
                # Nothing can be mapped of an empty file.
                os.ftruncate(self._descriptor, 0)
            if synced:
                os.fsync(self._descriptor)

    def name(self) -> None:
        with _writing(self.target):
            if self._begun is not None:
                self._begun.rename(self.target)
            else:
                # With a folder's descriptor, which an absolute path does not need, Python has the link followed.
                source = f"/proc/self/fd/{self._descriptor}"
                os.link(source, self.target, src_dir_fd=self._descriptor, follow_symlinks=True)

    def close(self) -> None:
        os.close(self._descriptor)
        if self._begun is not None:
            self._begun.unlink(missing_ok=True)


def _begin(target: Path) -> tuple[int, Path | None]:
    """A file without a name in the target's folder; where the file system knows none such, with one for the moment."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(target.parent, flags | os.O_TMPFILE, 0o666), None
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    begun = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    return os.open(begun, flags | os.O_CREAT | os.O_EXCL, 0o666), begun


def not_written(target: Path, error: OSError) -> ExportError:
    return ExportError(
        f"{target} can't be written: {error.strerror or error}",
        operation="export",
        key=str(target),
        hint="give a new name, in a folder with enough room",
    )
