"""A checkpoint of the durable tier as files: as it was saved, as one torch file, or as safetensors.

Every byte is verified on its way into a mapped file, so a process needs little memory. Internal: ``tiered-ckpt get`` is
its front.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from tiered_checkpoint_io.adapters.dcp_reader import PlanReader
from tiered_checkpoint_io.engine.chunks import Span, chunks_of, fetch_chunk
from tiered_checkpoint_io.engine.restore.targets import Target, by_chunk, fetch_targets
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import (
    ConfigError,
    CorruptCheckpointError,
    RestoreError,
    SaveError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.formats.shard_image import untouched
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry
from tiered_checkpoint_io.stores.base import Store
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
#: The errors of a file system that has no files without names.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
#: Prefix of the model's keys in Lightning's sharded strategies.
_MODEL_PREFIX = "state_dict."
#: Bytes of tensors in one file of a folder, except a larger tensor: as Hugging Face's libraries choose.
SHARD_SIZE = 5 * 10**9
#: Items of one file that are read together, bytes.
_BATCH = 32 << 20

#: Called with the bytes that have come.
Count: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of the durable tier.

    Attributes:
        store: The durable tier.
        name: The checkpoint's name.
        content: The save that is read.
        files: Its files.
        trust: The objects that may be loaded.
        concurrency: Requests in flight at once.
        count: Called with the bytes that have come.
    """

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

    def fetch(self, views: Mapping[str, memoryview]) -> None:
        """Reads files, by their paths, into buffers of their sizes.

        Raises:
            CorruptCheckpointError: The bytes differ from the saved ones.
            StoreError: The checkpoint could not be read.
        """

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


# ------------------------------------------------------------------------------------------- forms
def to_torch_file(source: Source, target: Path, *, replace: bool = False) -> list[Path]:
    """Writes the whole state as ``torch.save`` does; of a full checkpoint, copies the file.

    Raises:
        RestoreError: The checkpoint is local, or holds objects that are not trusted.
        SaveError: The target exists, or can't be written.
        CorruptCheckpointError: The bytes differ from the saved ones.
        StoreError: The checkpoint could not be read.
    """
    if _is_full(source):
        (entry,) = source.files
        with new_files([(target, entry.size)], replace=replace) as (mapping,):
            source.fetch({entry.path: memoryview(mapping)})
        return [target]
    sharded = _Sharded(source)
    tensors = {
        name: untouched(sharded.nbytes(name)).view(each.properties.dtype).view(each.size)
        for name, each in sharded.tensors.items()
    }
    flat = {**sharded.objects(), **tensors}
    flat = {name: flat[name] for name in sharded.metadata.state_dict_metadata}
    paths = sharded.metadata.planner_data
    state = unflatten_state_dict(flat, paths) if paths else flat
    image = plan(state)
    if not image.planned:
        # torch.save has written the elements, too: it has to write them again.
        sharded.fill(tensors)
        image = plan(state)
    names = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor.numel()}
    with new_files([(target, image.size)], replace=replace) as (mapping,):
        for segment in image.segments:
            mapping[segment.offset : segment.offset + len(segment.data)] = segment.data
        views: dict[str, torch.Tensor] = {}
        for region in image.regions:
            name = names.get(region.storage.data_ptr())
            if name is not None:
                views[name] = _view(mapping, region.offset, tensors[name].dtype, tensors[name].size())
            else:
                other: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
                mapping[region.offset : region.offset + region.nbytes] = other.set_(region.storage).numpy()
        if image.planned:
            sharded.fill(views, [mapping])
        views.clear()
    return [target]


def to_safetensors(source: Source, target: Path, *, prefix: str | None = None, replace: bool = False) -> list[Path]:
    """Writes tensors as Hugging Face's libraries read them: one file if the target is a file, else shards in a folder.

    Args:
        source: The checkpoint; a full one needs room for its file on the target's disk during the export.
        target: ``x.safetensors``, or a folder.
        prefix: Selects tensors, which are named without it. By default ``state_dict.`` if a name has it, else all.
        replace: Replace files of an earlier export.

    Returns:
        The files.

    Raises:
        SaveError: The target exists or can't be written; no tensor has the prefix; or safetensors has no name for an
            element type.
        TieredCheckpointError: As :func:`to_torch_file`.
    """
    is_file = target.suffix == ".safetensors"
    earlier = [] if is_file else sorted(target.glob("model*.safetensors*"))
    # Readers of a folder would take some files of each export.
    _refuse_existing(earlier, replace=replace)
    with contextlib.ExitStack() as held:
        tensors: _Tensors = held.enter_context(_full(source, target)) if _is_full(source) else _Sharded(source)
        named = _named(tensors, prefix, source.where)
        shards = [named] if is_file else _split(named, tensors)
        count, headers = len(shards), [_header(shard, tensors) for shard in shards]
        files = [
            target
            if is_file
            else target / ("model.safetensors" if count == 1 else f"model-{at:05}-of-{count:05}.safetensors")
            for at in range(1, count + 1)
        ]
        sizes = [size for _, _, size in headers]
        if count > 1:
            places = {name: file.name for shard, file in zip(shards, files, strict=True) for name in shard}
            total = sum(tensors.nbytes(name) for name in named.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            text = json.dumps(index, indent=2, sort_keys=True).encode()
            files.append(target / "model.safetensors.index.json")
            sizes.append(len(text))
        with new_files(list(zip(files, sizes, strict=True)), replace=replace) as mappings:
            if count > 1:
                mappings[-1][:] = text
            views = {}
            for shard, (header, offsets, _), mapping in zip(shards, headers, mappings, strict=False):
                mapping[: len(header)] = header
                for name, whole in shard.items():
                    dtype, size = tensors.kind(whole)
                    views[whole] = _view(mapping, len(header) + offsets[name], dtype, size)
            tensors.fill(views, mappings)
            views.clear()
    for each in earlier:
        if each not in files:
            each.unlink()
    return files


def _is_full(source: Source) -> bool:
    if source.content.kind == "local":
        raise RestoreError(
            f"{source.name} is a local checkpoint, each rank's state by itself",
            operation="get",
            key=source.where,
            hint="get its files into a folder, or load it by tiered_checkpoint_io.dcp with kind='local'",
            reason="other_kind",
        )
    return source.content.kind == "full"


def _view(mapping: mmap.mmap, offset: int, dtype: torch.dtype, size: torch.Size) -> torch.Tensor:
    count = math.prod(size)
    if not count:
        return torch.empty(size, dtype=dtype, device="cpu")
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(size)


def _named(tensors: _Tensors, prefix: str | None, where: str) -> dict[str, str]:
    """Returns the names to write, and the tensors that they mean."""
    names = tensors.names
    if prefix is None:
        prefix = _MODEL_PREFIX if any(name.startswith(_MODEL_PREFIX) for name in names) else ""
    found = {name.removeprefix(prefix): name for name in names if name.startswith(prefix) and name != prefix}
    if not found:
        heads = sorted({name.partition(".")[0] for name in names})
        raise SaveError(
            f"no tensor's name begins with {prefix!r}",
            operation="get",
            tier="durable",
            key=where,
            hint=f"names begin with: {', '.join(heads[:20]) or 'nothing, there are no tensors'}",
        )
    return found


def _split(named: Mapping[str, str], tensors: _Tensors) -> list[dict[str, str]]:
    shards: list[dict[str, str]] = [{}]
    size = 0
    for name, whole in named.items():
        nbytes = tensors.nbytes(whole)
        if shards[-1] and size + nbytes > SHARD_SIZE:
            shards.append({})
            size = 0
        shards[-1][name] = whole
        size += nbytes
    return shards


def _header(shard: Mapping[str, str], tensors: _Tensors) -> tuple[bytes, dict[str, int], int]:
    """Returns the first bytes of a file, the offset of each tensor from their end, and the size of the file."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, whole in shard.items():
        dtype, size = tensors.kind(whole)
        if dtype not in _SAFETENSORS:
            raise SaveError(
                f"safetensors has no name for {dtype}, the element type of {whole!r}",
                operation="get",
                hint="get a torch file, or choose other tensors by --prefix",
            )
        offsets[name], end = end, end + tensors.nbytes(whole)
        described[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(size), "data_offsets": [offsets[name], end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, offsets, len(header) + end


# ----------------------------------------------------------------------------------------- tensors
class _Sharded:
    """The items of a sharded checkpoint, read by DCP's plans through the reader of the restore."""

    def __init__(self, source: Source) -> None:
        """Reads ``.metadata``.

        Raises:
            CorruptCheckpointError: The file is missing, or damaged.
        """
        self._source = source
        self._files = _ShardFiles(source)
        data = bytes(self._files.ensure(METADATA, [(0, self._files.entry(METADATA).size)]))
        self.metadata: Metadata = parse_metadata(data, tier="durable", where=f"{source.where}/{METADATA}")
        self._places = self.metadata.storage_data or {}
        self.tensors = {
            name: each
            for name, each in self.metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        log = logging.getLogger("tiered_checkpoint_io.export")
        self._reader = PlanReader(self.metadata, self._files, None, source.trust, log)  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def kind(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Returns the element type and the size."""
        return self.tensors[name].properties.dtype, self.tensors[name].size

    def nbytes(self, name: str) -> int:
        return math.prod(self.tensors[name].size) * self.tensors[name].properties.dtype.itemsize

    def objects(self) -> dict[str, Any]:
        """Loads all that are no tensors; raises RestoreError if one is not trusted."""
        found: dict[str, Any] = dict.fromkeys(set(self.metadata.state_dict_metadata) - set(self.tensors))
        self._load(found)
        return found

    def fill(self, views: Mapping[str, torch.Tensor], mappings: Sequence[mmap.mmap] = ()) -> None:
        """Copies the elements into views of mappings, whose pages are released meanwhile."""
        for name in views:
            held = sum(math.prod(chunk.sizes) for chunk in self.tensors[name].chunks)
            if held != math.prod(self.tensors[name].size):
                text = f"the chunks of {name!r} hold {held} of its {math.prod(self.tensors[name].size)} elements"
                raise CorruptCheckpointError(text, operation="get", tier="durable", key=self._source.where)
        self._files.mappings = mappings
        self._load(dict(views))

    def _load(self, state: dict[str, Any]) -> None:
        """Loads items into a flat state, some of one file at a time, in the order in which they lie there."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        items = []
        for item in planner.create_local_plan().items:
            place = self._places.get(item.storage_index)
            if place is None:
                text = f"{item.storage_index.fqn!r} at {item.storage_index.offset} lies in no file"
                raise CorruptCheckpointError(text, operation="get", tier="durable", key=self._source.where)
            if getattr(place, "transform_descriptors", None):
                raise ConfigError(
                    f"{item.storage_index.fqn!r} was transformed by {place.transform_descriptors}",
                    operation="get",
                    key=self._source.where,
                    hint="load it by torch.distributed.checkpoint with the same extensions",
                )
            items.append((place.relative_path, place.offset, place.length, item))
        items.sort(key=lambda each: each[:2])
        batch, size = [], 0
        for at, (path, _, length, item) in enumerate(items):
            batch.append(item)
            size += length
            if size >= _BATCH or at + 1 == len(items) or items[at + 1][0] != path:
                self._reader.read(LoadPlan(batch), planner)
                self._files.drop()
                batch, size = [], 0


class _ShardFiles:
    """Verified bytes of files of the durable tier, as :class:`PlanReader` asks for them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._entries = {each.basename: each for each in source.files}
        self._here: dict[str, tuple[mmap.mmap, set[int]]] = {}
        self.mappings: Sequence[mmap.mmap] = ()

    def entry(self, basename: str) -> FileEntry:
        if basename not in self._entries:
            text = f"the checkpoint has no file {basename!r}"
            raise CorruptCheckpointError(text, operation="get", tier="durable", key=self._source.where)
        return self._entries[basename]

    def ensure(self, basename: str, spans: Iterable[Span]) -> memoryview:
        """Returns a file that has at least these spans, until :meth:`drop`."""
        entry, source = self.entry(basename), self._source
        wanted = set(chunks_of(entry, spans))
        if basename not in self._here:
            # Only written pages take memory.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            self._here[basename] = mmap.mmap(-1, max(1, entry.size), flags=flags), set()
        mapping, here = self._here[basename]
        view = memoryview(mapping)

        def one(index: int) -> None:
            offset, length = entry.chunks[index]
            fetch_chunk(source.store, entry, index, view[offset : offset + length])
            source.count(length)

        in_parallel(one, sorted(wanted - here), source.concurrency)
        here |= wanted
        return view

    def fill(self, basename: str, targets: Sequence[Target]) -> None:
        """Fills targets with bytes of a file, each chunk verified as it comes."""
        entry, source = self.entry(basename), self._source
        wanted = by_chunk(entry, targets)

        def one(index: int) -> None:
            fetch_targets(source.store, entry, index, wanted[index])
            source.count(entry.chunks[index][1])
            _let_go(self.mappings)

        in_parallel(one, wanted, source.concurrency)

    def drop(self) -> None:
        """Lets the bytes of :meth:`ensure` go."""
        self._here.clear()
        _let_go(self.mappings)


class _FullState:
    """The tensors of a file of ``torch.save``, by DCP's names."""

    def __init__(self, file: str, source: Source) -> None:
        state = source.trust.read(file, "the file", {"key": source.where}, map_location="cpu", mmap=True)
        if not isinstance(state, dict):
            text = f"the file holds a {type(state).__name__}, no dictionary"
            raise SaveError(text, operation="get", tier="durable", key=source.where)
        flat, _ = flatten_state_dict(state)
        self._where = source.where
        self._tensors = {name: each.detach() for name, each in flat.items() if isinstance(each, torch.Tensor)}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def kind(self, name: str) -> tuple[torch.dtype, torch.Size]:
        return self._tensors[name].dtype, self._tensors[name].size()

    def nbytes(self, name: str) -> int:
        return self._tensors[name].numel() * self._tensors[name].dtype.itemsize

    def fill(self, views: Mapping[str, torch.Tensor], mappings: Sequence[mmap.mmap] = ()) -> None:
        for name, view in views.items():
            if self._tensors[name].layout != torch.strided:
                hint = "get a torch file, or choose other tensors by --prefix"
                raise SaveError(f"{name!r} is sparse", operation="get", key=self._where, hint=hint)
            view.copy_(self._tensors[name])
            _let_go(mappings)


#: Tensors of a checkpoint by their names.
_Tensors: TypeAlias = _Sharded | _FullState


@contextlib.contextmanager
def _full(source: Source, target: Path) -> Iterator[_FullState]:
    """Fetches a full checkpoint's file to the target's disk, without a name, so that a kill leaves no file."""
    (entry,) = source.files
    with _writing(target), tempfile.TemporaryFile(dir=_folder_above(target)) as file:
        os.posix_fallocate(file.fileno(), 0, max(entry.size, 1))
        source.fetch({entry.path: memoryview(mmap.mmap(file.fileno(), max(entry.size, 1)))})
        yield _FullState(f"/proc/self/fd/{file.fileno()}", source)


def _let_go(mappings: Iterable[mmap.mmap]) -> None:
    """Releases written pages, which count as the process's own until then."""
    for each in mappings:
        each.madvise(mmap.MADV_DONTNEED)


# ------------------------------------------------------------------------------------------- files
@contextlib.contextmanager
def new_files(targets: Sequence[tuple[Path, int]], *, replace: bool = False) -> Iterator[list[mmap.mmap]]:
    """Maps files that get their names, in this order, once all are complete; a kill before leaves no file.

    Args:
        targets: Paths and sizes; missing folders are made.
        replace: Replace files that exist.

    Raises:
        SaveError: One exists, or can't be written; then none gets its name.
    """
    _refuse_existing([path for path, _ in targets if os.path.lexists(path)], replace=replace)
    with contextlib.ExitStack() as held:
        with local_work():
            files = [held.enter_context(contextlib.closing(_NewFile(*each))) for each in targets]
        with _writing(targets[0][0]) if targets else contextlib.nullcontext():
            yield [each.mapped() for each in files]
        with local_work():
            for each in files:
                each.complete()
            named: list[Path] = []
            try:
                for each in files:
                    each.name(replace=replace)
                    named.append(each.target)
            except BaseException:
                for path in () if replace else named:
                    path.unlink(missing_ok=True)
                raise


def _refuse_existing(existing: Sequence[Path], *, replace: bool) -> None:
    if existing and not replace:
        more = f", and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise SaveError(
            f"{existing[0]} exists already{more}",
            operation="get",
            key=str(existing[0]),
            hint="give another TO, or replace it by --yes",
        )


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


class _NewFile:
    """A file that has no name yet; each method raises SaveError."""

    def __init__(self, target: Path, size: int) -> None:
        self.target, self._size = target, size
        with _writing(target):
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

    def complete(self) -> None:
        with _writing(self.target):
            if not self._size:
                # An empty file can't be mapped.
                os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)

    def name(self, *, replace: bool) -> None:
        with _writing(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if self._begun is None:
                # A link replaces no file.
                made = _beside(self.target) if replace else self.target
                # With a folder's descriptor, which an absolute path does not need, Python has the link followed.
                source = f"/proc/self/fd/{self._descriptor}"
                os.link(source, made, src_dir_fd=self._descriptor, follow_symlinks=True)
                self._begun = made if replace else None
            if self._begun is not None:
                self._begun.rename(self.target)

    def close(self) -> None:
        os.close(self._descriptor)
        if self._begun is not None:
            self._begun.unlink(missing_ok=True)


def _begin(target: Path) -> tuple[int, Path | None]:
    """Opens a file without a name; with a temporary name if the file system needs one."""
    folder = _folder_above(target)
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o666), None
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    begun = _beside(folder / target.name)
    return os.open(begun, flags | os.O_CREAT | os.O_EXCL, 0o666), begun


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _folder_above(target: Path) -> Path:
    """Returns the nearest folder that exists already."""
    return next(each for each in Path(os.path.abspath(target)).parents if each.is_dir())
