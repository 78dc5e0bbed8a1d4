"""Manifests, indexes and parts of a checkpoint, as data. Pure; no input or output.

A *part* describes one rank's contribution to one save. A *manifest* proves that a checkpoint exists, and describes its
bytes. Both are versioned JSON, sealed by a digest: see ``documents``.

A manifest that would grow with the number of parts or chunks names an *index* instead of files. The index has one row a
part; the part's description, an object of its own, has the hashes: see ``ids.index_key`` and ``ids.description_key``.
So a reader of one part reads the manifest, the index and one description.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import (
    DIGEST_LENGTH,
    MAX_OBJECT,
    MAX_SIZE,
    AtPlace,
    Place,
    Server,
    chunk_ranges,
    chunk_size_for,
    digest_of,
    dump,
    fields_of,
    hash_bytes,
    int_of,
    list_of,
    load,
    located,
    server_in,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


#: Usual names of files: they need no closer look.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,199}\Z")
_MAX_TOTAL_SIZE = 1 << 62


@dataclass(frozen=True, slots=True)
class IndexRef:
    """Reference of a manifest to the index of a save."""

    #: Bytes of the index.
    size: int
    #: Digest of the index, as it is stored.
    digest: str
    #: Bytes of all files that it lists.
    total: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> IndexRef:
        return cls(int_of(raw, "size", 1, MAX_SIZE), digest_of(raw, "digest"), int_of(raw, "total", 0, _MAX_TOTAL_SIZE))


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One part of a save: path and size of each of its files, and the digest of its description as it is stored."""

    files: tuple[tuple[str, int], ...]
    digest: str

    @classmethod
    def of(cls, part: Part) -> IndexRow:
        return cls(tuple((entry.path, entry.size) for entry in part.content.files), hash_bytes(part.to_json()))


@dataclass(frozen=True, slots=True)
class Index:
    """All parts of a save."""

    #: The checkpoint's.
    name: str
    save_id: str
    #: Rows by rank; a checkpoint of one part has that part, whichever rank wrote it.
    rows: Mapping[int, IndexRow]

    @property
    def paths(self) -> Iterator[tuple[str, int]]:
        """Path and size of each file of the save."""
        return (file for row in self.rows.values() for file in row.files)

    def to_json(self) -> tuple[bytes, IndexRef]:
        """Returns the index as it is stored, and a manifest's reference to it."""
        prefix = f"{self.name}/"
        rows = [
            [rank, [[_relative(path, prefix), size] for path, size in row.files], row.digest]
            for rank, row in sorted(self.rows.items())
        ]
        body = {"name": self.name, "save_id": self.save_id, "rows": rows}
        data = dump(body, compact=True)
        return data, IndexRef(len(data), hash_bytes(data), sum(size for _, size in self.paths))

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Index:
        """Reads an index; raises as :meth:`Manifest.from_json` does."""
        raw = load(data, where)
        with located(where):
            name = ids.validate_name(value_of(raw, "name", str))
            rows = list_of(raw, "rows", list)
            made = dict(_row(row, name) for row in rows)
            if len(made) != len(rows):
                raise CorruptCheckpointError("rows: two parts of one rank")
            return cls(name, ids.validate_save_id(value_of(raw, "save_id", str)), made)


def _relative(path: str, prefix: str) -> str:
    """Returns a path within the folder of its checkpoint; empty for the file of a checkpoint that is one."""
    return path[len(prefix) :] if path.startswith(prefix) else ""


def _row(raw: object, name: str) -> tuple[int, IndexRow]:
    match raw:
        case [int(rank), list(files), str(digest)] if 0 <= rank < 1 << 31 and len(digest) == DIGEST_LENGTH:
            return rank, IndexRow(tuple(_file(file, name) for file in files), digest)
    raise CorruptCheckpointError("rows[]: expected a rank, files and a digest")


def _file(raw: object, name: str) -> tuple[str, int]:
    match raw:
        case [str(basename), int(size)] if size >= 0 and "/" not in basename:
            path = f"{name}/{basename}" if basename else name
            # There may be 100,000 of them.
            return (path if _PLAIN.match(basename) else ids.validate_name(path)), size
    raise CorruptCheckpointError("rows[].files[]: expected a basename and a size")


def check_digest(data: bytes, digest: str, what: str, *, key: str) -> None:
    """Raises CorruptCheckpointError if an object differs from the digest that another one holds of it."""
    if hash_bytes(data) != digest:
        raise CorruptCheckpointError(f"{what} differs from its digest", operation="read", tier="durable", key=key)


#: The file of a ``sharded`` checkpoint with the places of its tensors; torch gives it this name.
METADATA = ".metadata"

Kind = Literal["full", "sharded", "local"]
KINDS: tuple[Kind, ...] = ("full", "sharded", "local")


# ------------------------------------------------------------------------------------------ files
@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    #: On the durable tier, relative to dirpath; in memory it lies in its part's folder, under the last component.
    path: str
    size: int
    #: Bytes of each chunk but the last.
    chunk_size: int
    #: xxh3-128 of each chunk, as hexadecimal digits.
    hashes: tuple[str, ...]

    @property
    def basename(self) -> str:
        """The file's name in the memory tier."""
        return self.path.rpartition("/")[2]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """``(offset, length)`` of each chunk, in the order of ``hashes``."""
        return chunk_ranges(self.size, self.chunk_size)

    def check_chunk(self, index: int, data: memoryview | bytes, *, tier: str, where: str) -> None:
        """Raises CorruptCheckpointError if chunk ``index`` differs from its hash."""
        self.check_digest(index, hash_bytes(data), tier=tier, where=where)

    def check_digest(self, index: int, digest: str, *, tier: str, where: str) -> None:
        """Does :meth:`check_chunk`, by the digest of the bytes that were read."""
        if digest != self.hashes[index]:
            offset, length = self.chunks[index]
            raise CorruptCheckpointError(
                f"bytes {offset}-{offset + length} of {self.path!r} differ from their hash",
                operation="verify",
                tier=tier,
                key=where,
            )

    @classmethod
    def of(cls, path: str, data: bytes) -> FileEntry:
        """Returns the description of a small file with this content."""
        chunk_size, view = chunk_size_for(len(data)), memoryview(data)
        hashes = [hash_bytes(view[start : start + size]) for start, size in chunk_ranges(len(data), chunk_size)]
        return cls(path, len(data), chunk_size, tuple(hashes))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FileEntry:
        path = ids.validate_name(value_of(raw, "path", str))
        # Above it no object can exist: a manifest that claims more is damaged or hostile.
        size = int_of(raw, "size", 0, MAX_OBJECT)
        chunk_size = int_of(raw, "chunk_size", 1, MAX_OBJECT)
        hashes = list_of(raw, "hashes", str)
        expected = max(1, -(-size // chunk_size))
        if len(hashes) != expected or not all(len(digest) == DIGEST_LENGTH for digest in hashes):
            raise CorruptCheckpointError(
                f"hashes of {path!r}: expected {expected}, of {DIGEST_LENGTH} hexadecimal digits each"
            )
        return cls(path, size, chunk_size, tuple(hashes))


# ---------------------------------------------------------------------------------------- content
@dataclass(frozen=True, slots=True)
class Metric:
    """The value that a ModelCheckpoint monitored when it saved, and the metric's name."""

    monitor: str
    value: float

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Metric:
        return cls(value_of(raw, "monitor", str), value_of(raw, "value", float))


@dataclass(frozen=True, slots=True)
class Content:
    """Content that one save put under a name."""

    #: Id of the save; as text, ids sort in the order of the saves.
    save_id: str
    #: The global training step, and the epoch; -1 if the state has none.
    step: int
    epoch: int
    #: The payload's format; for adapters.
    kind: Kind
    #: Seconds since the epoch, by the writer's clock; for people, not for ordering.
    created: float
    #: The number of ranks that trained.
    world_size: int
    #: Versions of the software that wrote it.
    writer: Mapping[str, str]
    #: All files of the checkpoint (manifest), or of one rank (part); none if there is an index.
    files: tuple[FileEntry, ...]
    #: Value that ModelCheckpoint monitored, if it did.
    metric: Metric | None = None
    #: Number of the checkpoint's parts.
    parts: int = 1
    #: The rank whose drain commits the save; -1 if this rank does not know.
    coordinator: int = -1
    #: The basename of the file whose change turns the old content of a name into the new one; None if only the manifest
    #: changes.
    switch: str | None = None
    #: True if training can resume from it; False for a weights-only checkpoint.
    resumable: bool = True
    #: The namespace that saved it; empty if that is not known.
    namespace: str = ""
    #: Id of the save that made the bytes, for a copy of another checkpoint.
    copy_of: str = ""
    #: In a manifest: the object that lists the files instead of it; see ``engine/durable/files.py``.
    index: IndexRef | None = None

    def switch_path(self, name: str) -> str | None:
        """Returns the key of the switch of a checkpoint of this name; None if it has none."""
        return name if self.kind == "full" else f"{name}/{self.switch}" if self.switch is not None else None

    @property
    def origin(self) -> str:
        """The save that made its bytes."""
        return self.copy_of or self.save_id

    @property
    def order(self) -> tuple[str, bool]:
        """Sorts contents in the order of their saves: a copy comes right before the save that made its bytes.

        Restarts prefer the latest save, not the greatest step: who went back to step 100 and trained on to step 110
        does not want step 500 of the abandoned branch.
        """
        return (self.origin, not self.copy_of)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.index.total if self.index is not None else sum(entry.size for entry in self.files)

    def without_hashes(self) -> Content:
        """Returns the same without hashes, to send to all ranks: hashes grow with the files."""
        return replace(self, files=tuple(replace(entry, hashes=()) for entry in self.files))

    def to_json(self) -> dict[str, Any]:
        document = fields_of(self)
        del document["files" if self.index is not None else "index"]
        if not self.copy_of:
            del document["copy_of"]
        return document

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Content:
        kind = value_of(raw, "kind", str)
        if kind not in KINDS:
            raise CorruptCheckpointError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
        is_indexed, has_metric, has_switch = (raw.get(key) is not None for key in ("index", "metric", "switch"))
        files = () if is_indexed else list_of(raw, "files", dict)
        return cls(
            save_id=ids.validate_save_id(value_of(raw, "save_id", str)),
            step=int_of(raw, "step", -1, 1 << 62),
            epoch=int_of(raw, "epoch", -1, 1 << 62),
            kind=kind,
            created=value_of(raw, "created", float),
            world_size=int_of(raw, "world_size", 1, 1 << 31),
            writer={key: str(value) for key, value in value_of(raw, "writer", dict).items()},
            files=tuple(FileEntry.from_json(entry) for entry in files),
            metric=Metric.from_json(value_of(raw, "metric", dict)) if has_metric else None,
            parts=int_of(raw, "parts", 1, 1 << 31),
            coordinator=int_of(raw, "coordinator", -1, 1 << 31),
            switch=value_of(raw, "switch", str) if has_switch else None,
            resumable=value_of(raw, "resumable", bool),
            namespace=value_of(raw, "namespace", str),
            copy_of=ids.validate_save_id(value_of(raw, "copy_of", str)) if raw.get("copy_of") else "",
            index=IndexRef.from_json(value_of(raw, "index", dict)) if is_indexed else None,
        )


# --------------------------------------------------------------------------------------- manifest
@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint on the durable tier: it exists if and only if its manifest does."""

    #: The checkpoint's: its path relative to dirpath.
    name: str
    content: Content
    #: Contents that the objects may still hold during an overwrite, the newest first. A reader takes the one of
    #: ``content`` and these that the bytes match.
    previous: tuple[Content, ...] = ()
    #: Names of aliases that may point here.
    aliases: tuple[str, ...] = ()
    #: For an alias, the name of the checkpoint whose files it names.
    alias_of: str | None = None
    #: The mark of a reservation that this name once had, see :func:`reservation`; empty if it never had one.
    reserved: str = ""

    @property
    def settled(self) -> Content:
        """The last content that is known to be complete: its objects hold this, or one of a later overwrite."""
        return self.previous[-1] if self.previous else self.content

    def to_json(self) -> bytes:
        """Returns the manifest as it is stored."""
        return dump(
            {
                "name": self.name,
                **self.content.to_json(),
                "previous": [content.to_json() for content in self.previous],
                "aliases": list(self.aliases),
                "alias_of": self.alias_of,
                **({"reserved": self.reserved} if self.reserved else {}),
            }
        )

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Manifest:
        """Reads a manifest; ``where`` is its key or path, for errors.

        Raises:
            CorruptCheckpointError: The data is not a manifest, or has another format version.
        """
        raw = load(data, where)
        with located(where):
            is_alias = raw.get("alias_of") is not None
            return cls(
                name=ids.validate_name(value_of(raw, "name", str)),
                content=Content.from_json(raw),
                previous=tuple(Content.from_json(entry) for entry in list_of(raw, "previous", dict)),
                aliases=tuple(ids.validate_name(alias) for alias in list_of(raw, "aliases", str)),
                alias_of=ids.validate_name(value_of(raw, "alias_of", str)) if is_alias else None,
                reserved=value_of(raw, "reserved", str, ""),
            )


def reservation(name: str, mark: str) -> bytes:
    """Returns a document for a manifest's place while an unnamed object of its name is replaced or removed.

    The document means that there is no checkpoint. A drain that read the place before can no longer commit that object.
    Once there was a manifest, the place is never empty again: emptied, it would look as it did before.
    """
    return dump({"name": name, "reserved": mark})


def reservation_in(data: bytes) -> str:
    """Returns the mark of a reservation; empty for any other document."""
    try:
        raw = load(data, "")
    except CorruptCheckpointError:
        return ""
    mark = raw.get("reserved")
    return mark if isinstance(mark, str) and "save_id" not in raw else ""


# ------------------------------------------------------------------------------------------- part
@dataclass(frozen=True, slots=True)
class Part(AtPlace):
    """One rank's contribution to one save, as it is in the memory tier."""

    #: The checkpoint's.
    name: str
    #: The rank that wrote it.
    rank: int
    #: Its files, and the facts of the save.
    content: Content
    #: The durable tier that it belongs to.
    dirpath: str
    #: True if it is to be drained to that. A committed part with this set *is* the request to upload it.
    durable: bool
    #: Server of an S3 durable tier.
    server: Server | None = None
    #: Common part of the names that the same ranks save before and after it; "" for all saves of one job.
    series: str = ""
    _raw: bytes = field(default=b"", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        content = self.content
        if content.coordinator < 0 and any(entry.basename == content.switch for entry in content.files):
            object.__setattr__(self, "content", replace(content, coordinator=self.rank))

    @classmethod
    def found(cls, name: str, rank: int, content: Content, place: Place) -> Part:
        """Returns a part of a checkpoint that was found on the durable tier."""
        series = "" if content.kind == "full" else ids.series_of(name, content.step)
        return cls(name, rank, content, place.dirpath, durable=True, server=place.server, series=series)

    @property
    def save_id(self) -> str:
        return self.content.save_id

    @property
    def series_key(self) -> tuple[Place, str, int]:
        """Equal for saves that the same ranks make one after the other; process groups may save side by side."""
        return self.place, self.series, self.content.coordinator

    @property
    def commits(self) -> bool:
        """True if the drain that holds this part commits the save: the coordinator's drain does."""
        return self.rank == self.content.coordinator

    def to_json(self) -> bytes:
        """Returns the part as it is stored (``part.json``); of one that was read, the bytes that were read.

        An index names a part by the digest of its description.
        """
        return self._raw or dump(
            {
                "name": self.name,
                "rank": self.rank,
                **self.content.to_json(),
                "dirpath": self.dirpath,
                "durable": self.durable,
                **({"server": self.server} if self.server is not None else {}),
                "series": self.series,
            }
        )

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Part:
        """Reads a part; raises as :meth:`Manifest.from_json` does."""
        raw = load(data, where)
        with located(where):
            part = cls(
                name=ids.validate_name(value_of(raw, "name", str)),
                rank=int_of(raw, "rank", 0, 1 << 31),
                content=Content.from_json(raw),
                dirpath=value_of(raw, "dirpath", str),
                durable=value_of(raw, "durable", bool),
                server=server_in(raw),
                series=value_of(raw, "series", str),
            )
        if part.content.index is not None:
            raise CorruptCheckpointError("a part lists its files itself", operation="parse", key=where)
        object.__setattr__(part, "_raw", bytes(data))
        return part
