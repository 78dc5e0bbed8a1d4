"""The files of a checkpoint on the durable tier: named by its manifest, or by an index and descriptions beside it.

Whoever chooses among checkpoints reads manifests alone. Whoever reads the bytes of one asks here for the files that
it needs, and only their descriptions are fetched, each once.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property

from tiered_checkpoint_io.engine.durable.manifests import in_parallel
from tiered_checkpoint_io.errors import CorruptCheckpointError, FormatVersionError, ManifestError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.index import Index, check_digest
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part
from tiered_checkpoint_io.stores.base import Store

#: How the files of sharded and of local checkpoints tell their rank.
_RANK = re.compile(r"(?:__|rank-)(?P<rank>\d+)[_.-]")


class Files:
    """The files of one save; descriptions are read when they are asked for, each once. For many threads."""

    def __init__(self, store: Store, content: Content, index: Index | None) -> None:
        """Takes what :func:`files_of` has read.

        Args:
            store: The durable tier.
            content: Lists the files where there is no index.
            index: The rows of all parts.
        """
        self._store = store
        self._content = content
        self._index = index
        self._lock = threading.Lock()
        self._read: dict[int, tuple[FileEntry, ...]] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file, by its path; reads no description."""
        if self._index is not None:
            return dict(self._index.paths)
        return {entry.path: entry.size for entry in self._content.files}

    def of_rank(self, rank: int) -> tuple[FileEntry, ...]:
        """The files of one rank's part; of a checkpoint of one part, all of them, whichever rank is asked for.

        Raises:
            CorruptCheckpointError: Their description is missing, or is not the one that was committed.
            StoreError: The tier could not be asked.
        """
        if self._index is None:
            return self._content.files if self._content.parts == 1 else tuple(self._inline(rank))
        if len(self._index.rows) == 1:
            (rank,) = self._index.rows
        with self._lock:
            found = self._read.get(rank)
        if found is None:
            row = self._index.rows.get(rank)
            if row is None:
                return ()
            found = read_description(self._store, self._index, rank).content.files
            with self._lock:
                self._read[rank] = found
        return found

    def _inline(self, rank: int) -> Iterator[FileEntry]:
        # Parts are listed one after the other: a file whose name tells no rank is of the part of the one before.
        owner = 0
        for entry in self._content.files:
            match = _RANK.match(entry.basename)
            owner = int(match["rank"]) if match else owner
            if owner == rank:
                yield entry

    def entry(self, basename: str) -> FileEntry | None:
        """One file; None where there is none of this basename. Raises as :meth:`of_rank`."""
        files = self._content.files
        if self._index is not None:
            rank = self._owners.get(basename)
            files = self.of_rank(rank) if rank is not None else ()
        return next((entry for entry in files if entry.basename == basename), None)

    @cached_property
    def _owners(self) -> dict[str, int]:
        rows = self._index.rows if self._index is not None else {}
        return {path.rpartition("/")[2]: rank for rank, row in rows.items() for path, _ in row.files}

    def all(self) -> tuple[FileEntry, ...]:
        """All files: reads all descriptions. Raises as :meth:`of_rank`."""
        if self._index is None:
            return self._content.files
        return tuple(entry for files in in_parallel(self.of_rank, self._index.rows) for entry in files)


def files_of(store: Store, content: Content, index: bytes | None = None) -> Files:
    """The files of a save, of any format.

    Args:
        store: The durable tier.
        content: From a manifest.
        index: What :func:`read_index` gave another process of the node; read where it is not given.

    Raises:
        CorruptCheckpointError: The index is missing, or is not the one that was committed.
        StoreError: The tier could not be asked.
    """
    if content.index is None:
        return Files(store, content, None)
    data = read_index(store, content) if index is None else content.index.check(index, key=_where(store, content))
    return Files(store, content, parse_index(store, content, data))


def read_index(store: Store, content: Content) -> bytes:
    """The index of a save, verified; empty where the manifest lists the files itself. Raises as :func:`files_of`."""
    if content.index is None:
        return b""
    data = _get(store, ids.index_key(content.save_id))
    return content.index.check(data, key=_where(store, content))


def parse_index(store: Store, content: Content, data: bytes) -> Index:
    """What an index says.

    Raises:
        CorruptCheckpointError: It is not the index of this save.
    """
    where = _where(store, content)
    try:
        index = Index.from_json(data, where=where)
        if index.save_id != content.save_id:
            raise ManifestError("the index of another save", operation="parse", key=where)
    except FormatVersionError:
        raise
    except ManifestError as error:
        raise CorruptCheckpointError(error.message, operation="read", tier="durable", key=where) from error
    return index


def read_description(store: Store, index: Index, rank: int) -> Part:
    """The description of a part that an index names.

    Raises:
        CorruptCheckpointError: It is missing, or is not the one that was committed.
        StoreError: The tier could not be asked.
    """
    key = ids.description_key(index.save_id, rank)
    where, data = f"{store.url}/{key}", _get(store, key)
    check_digest(data, index.rows[rank].digest, "the description of a part", key=where)
    try:
        return parse_description(data, index.name, index.save_id, rank, where=where)
    except FormatVersionError:
        raise
    except ManifestError as error:
        raise CorruptCheckpointError(error.message, operation="read", tier="durable", key=where) from error


def parse_description(data: bytes, name: str, save_id: str, rank: int, *, where: str) -> Part:
    """A part whose description was read.

    Raises:
        ManifestError: It is that of another part, or names files outside of its checkpoint.
    """
    part = Part.from_json(data, where=where)
    if (part.name, part.save_id, part.rank) != (name, save_id, rank):
        raise ManifestError("the description of another part", operation="parse", tier="durable", key=where)
    check_paths(part)
    return part


def check_paths(part: Part) -> None:
    """Refuses a part that names files of others.

    Raises:
        ManifestError: It names a file outside of the folder of its checkpoint.
    """
    for entry in part.content.files:
        if entry.path not in (part.name, f"{part.name}/{entry.basename}"):
            raise ManifestError(f"file {entry.path!r} is not in the folder of its checkpoint", key=part.name)


def paths_in(store: Store, contents: Iterable[Content]) -> set[str]:
    """The keys of all files of some contents. Raises as :func:`files_of`."""
    return {path for content in contents for path in files_of(store, content).sizes}


def _get(store: Store, key: str) -> bytes:
    """A small object that has to be there."""
    try:
        return store.get(key)
    except StoreNotFoundError as error:
        raise CorruptCheckpointError(
            "it is missing, while the manifest that needs it is there",
            operation="read",
            tier="durable",
            key=f"{store.url}/{key}",
        ) from error


def _where(store: Store, content: Content) -> str:
    return f"{store.url}/{ids.index_key(content.save_id)}"
