"""A checkpoint of the durable tier as files: as it was saved, as one torch file, or as safetensors.

Its files are fetched first, every byte verified; torch and the reader of the restore convert them. Internal:
``tiered-ckpt get`` is its front.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tiered_checkpoint_io.adapters.dcp_reader import PlanReader
from tiered_checkpoint_io.engine.chunks import Span, Target, fetch_chunk
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError, SaveError, TieredCheckpointError
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.retry import local_work

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
#: Prefix of the model's keys in Lightning's sharded strategies.
_MODEL_PREFIX = "state_dict."
_OTHERS = "get a torch file, or choose other tensors by --prefix"

#: Called with the bytes that have come.
Count: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of the durable tier."""

    store: Store
    name: str
    content: Content
    files: Sequence[FileEntry]
    trust: Trust
    concurrency: int
    count: Count

    @property
    def where(self) -> str:
        """The checkpoint's URL."""
        return ids.join_url(self.store.url, self.name)

    @property
    def is_full(self) -> bool:
        """True for a full checkpoint, False for a sharded one; raises RestoreError for a local one."""
        if self.content.kind == "local":
            raise RestoreError(
                f"{self.name} is a local checkpoint, each rank's state by itself",
                operation="get",
                key=self.where,
                hint="get its files into a folder, or load it by tiered_checkpoint_io.dcp with kind='local'",
                reason="other_kind",
            )
        return self.content.kind == "full"

    def fetch(self, views: Mapping[str, memoryview]) -> None:
        """Reads files, by their paths, into buffers of their sizes; raises CorruptCheckpointError or StoreError."""

        def one(job: tuple[FileEntry, int]) -> None:
            entry, index = job
            self.count(0)
            if index == 0 and (size := self.store.size(entry.path)) != entry.size:
                text = f"{size} bytes instead of {entry.size}"
                raise CorruptCheckpointError(text, operation="get", tier="durable", key=entry.path)
            offset, length = entry.chunks[index]
            with views[entry.path][offset : offset + length] as chunk:
                fetch_chunk(self.store, entry, index, chunk)
            self.count(length)

        wanted = [entry for entry in self.files if entry.path in views]
        in_parallel(one, [(each, index) for each in wanted for index in range(len(each.hashes))], self.concurrency)

    def fetch_to(self, folder: Path) -> list[Path]:
        """Reads all files into a folder, under their basenames; raises SaveError if they can't be written."""
        made = [folder / each.basename for each in self.files]
        with contextlib.ExitStack() as held:
            views = {}
            for path, entry in zip(made, self.files, strict=True):
                with _writing(path), local_work():
                    file = held.enter_context(path.open("xb+"))
                    if entry.size:
                        # A mapped page without space would end the process when it is touched.
                        os.posix_fallocate(file.fileno(), 0, entry.size)
                    views[entry.path] = _mapped(file)
            self.fetch(views)
        return made


# ------------------------------------------------------------------------------------------- forms
def to_torch_file(source: Source, folder: Path) -> Path:
    """Makes a file of the whole state as ``torch.save`` does; of a full checkpoint, copies the file.

    Raises RestoreError if the checkpoint is local, or holds objects that are not trusted.
    """
    is_full, made = source.is_full, source.fetch_to(folder)
    if is_full:
        return made[0]
    path = folder / "torch"
    with local_work(), _writing(path), path.open("xb") as file:
        state = _Sharded(source, folder).state()
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # A write that fails is an error of torch's own.
            raise error.__context__ or error from None
    return path


def to_safetensors(source: Source, folder: Path, *, prefix: str | None = None) -> Path:
    """Makes a file of tensors as Hugging Face's libraries read them.

    All files are made in ``folder``. ``prefix`` selects tensors, which are named without it: by default ``state_dict.``
    if a name has it, else all. Raises SaveError if no tensor has it, and as :func:`to_torch_file`.
    """
    is_full, path = source.is_full, folder / "safetensors"
    source.fetch_to(folder)
    with local_work(), _writing(path), path.open("xb") as file:
        if is_full:
            found = _full(source, folder)
            named = _named(found, prefix, source.where)
        else:
            sharded = _Sharded(source, folder)
            named = _named(sharded.tensors, prefix, source.where)
            found = sharded.load(named.values())
        tensors = {name: found[whole] for name, whole in named.items()}
        file.write(_header(tensors, source.where))
        for tensor in tensors.values():
            plain = tensor.contiguous().resolve_conj().resolve_neg()
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
    return path


def _named(tensors: Iterable[str], prefix: str | None, where: str) -> dict[str, str]:
    """Returns the names to write, and the tensors that they mean."""
    if prefix is None:
        prefix = _MODEL_PREFIX if any(name.startswith(_MODEL_PREFIX) for name in tensors) else ""
    found = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix) and name != prefix}
    if not found:
        heads = sorted({name.partition(".")[0] for name in tensors})
        raise SaveError(
            f"no tensor's name begins with {prefix!r}",
            operation="get",
            tier="durable",
            key=where,
            hint=f"names begin with: {', '.join(heads[:20]) or 'nothing, there are no tensors'}",
        )
    return found


def _header(tensors: Mapping[str, torch.Tensor], where: str) -> bytes:
    """Returns the first bytes of a file of these tensors."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise SaveError(f"{name!r} is sparse", operation="get", key=where, hint=_OTHERS)
        if tensor.dtype not in _SAFETENSORS:
            why = f"safetensors has no name for {tensor.dtype}, the element type of {name!r}"
            raise SaveError(why, operation="get", key=where, hint=_OTHERS)
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        dtype, shape = _SAFETENSORS[tensor.dtype], list(tensor.shape)
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    padded = text + b" " * (-len(text) % 8)
    return struct.pack("<Q", len(padded)) + padded


# ----------------------------------------------------------------------------------------- tensors
def _full(source: Source, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file of ``torch.save``, by DCP's names."""
    file = folder / source.files[0].basename
    state = source.trust.read(str(file), "the file", {"key": source.where}, map_location="cpu", mmap=True)
    if not isinstance(state, dict):
        text = f"the file holds a {type(state).__name__}, no dictionary"
        raise SaveError(text, operation="get", tier="durable", key=source.where)
    flat, _ = flatten_state_dict(state)
    return {name: each.detach() for name, each in flat.items() if isinstance(each, torch.Tensor)}


class _Sharded:
    """A sharded checkpoint, read by DCP's plans through the reader of the restore."""

    def __init__(self, source: Source, folder: Path) -> None:
        data = (folder / METADATA).read_bytes()
        self._metadata: Metadata = parse_metadata(data, tier="durable", where=f"{source.where}/{METADATA}")
        described = self._metadata.state_dict_metadata
        #: Type and shape of its tensors, by DCP's names.
        self.tensors = {name: each for name, each in described.items() if isinstance(each, TensorStorageMetadata)}
        log, files = logging.getLogger("tiered_checkpoint_io.export"), _Here(folder)
        self._reader = PlanReader(self._metadata, files, source.trust, log)  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        """Loads the whole state; raises RestoreError if an object is not trusted."""
        flat, paths = self.load(self._metadata.state_dict_metadata), self._metadata.planner_data
        return unflatten_state_dict(flat, paths) if paths else flat

    def load(self, names: Iterable[str]) -> dict[str, Any]:
        """Loads some items, by DCP's names."""
        found: dict[str, Any] = dict.fromkeys(names)
        for name, each in self.tensors.items():
            if name in found:
                found[name] = torch.empty(each.size, dtype=each.properties.dtype, device="cpu")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(found, self._metadata, is_coordinator=True)
        self._reader.read(planner.create_local_plan(), planner)
        return found


class _Here:
    """Files in a folder, whole and verified, as :class:`PlanReader` asks for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ensure(self, basename: str, spans: Iterable[Span]) -> memoryview:  # noqa: ARG002
        with (self._folder / basename).open("r+b") as file:
            return _mapped(file)

    def fill(self, basename: str, targets: Sequence[Target]) -> None:
        view = self.ensure(basename, ())
        for offset, buffer in targets:
            buffer[:] = view[offset : offset + len(buffer)]


# ------------------------------------------------------------------------------------------- files
@contextlib.contextmanager
def folder_for(target: Path) -> Iterator[Path]:
    """Makes a hidden folder on the file system of a target, and removes it with all that is in it."""
    path = Path(os.path.abspath(target))
    above = next(each for each in (path, *path.parents) if each.is_dir())
    with _writing(target):
        folder = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=above, ignore_cleanup_errors=True)
    with folder as made:
        yield Path(made)


def give_names(files: Mapping[Path, Path], *, replace: bool) -> None:
    """Gives complete files their names, the keys, in this order; makes missing folders."""
    refuse_existing(files, replace=replace)
    with local_work():
        for target, made in files.items():
            with _writing(target), made.open("rb") as file:
                os.fsync(file.fileno())
                target.parent.mkdir(parents=True, exist_ok=True)
        for target, made in files.items():
            with _writing(target):
                made.replace(target)


def refuse_existing(targets: Iterable[Path], *, replace: bool) -> None:
    """Raises SaveError if a target exists, unless it is to be replaced."""
    existing = [path for path in targets if os.path.lexists(path)]
    if existing and not replace:
        more = f", and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise SaveError(
            f"{existing[0]} exists already{more}",
            operation="get",
            key=str(existing[0]),
            hint="give another TO, or replace it by --yes",
        )


def _mapped(file: BinaryIO) -> memoryview:
    """Maps a whole file, which must have its space; an empty one can't be mapped."""
    return memoryview(mmap.mmap(file.fileno(), 0) if os.fstat(file.fileno()).st_size else b"")


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, TieredCheckpointError):
            raise
        raise SaveError(
            f"{target} can't be written: {error.strerror or error}",
            operation="get",
            key=str(target),
            hint="give another TO, in a folder with enough room",
        ) from error
