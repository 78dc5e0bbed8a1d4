"""The index of a save: the files of its parts, without the hashes of their chunks. Pure.

A manifest that would grow with the number of parts or chunks names an index instead of files. The index has one row a
part; the part's description, an object of its own, has the hashes: see ``ids.index_key`` and ``ids.description_key``.
So a reader of one part reads the manifest, the index and one description.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import (
    DIGEST_LENGTH,
    MAX_SIZE,
    digest_of,
    dump,
    int_of,
    list_of,
    load,
    located,
    value_of,
)
from tiered_checkpoint_io.model.hashing import hash_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tiered_checkpoint_io.model.manifest import Part

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
