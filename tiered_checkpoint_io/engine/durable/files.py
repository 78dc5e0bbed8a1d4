"""The files of a checkpoint on the durable tier: named by its manifest, or by its index and descriptions.

To choose among checkpoints, manifests are enough. To read the bytes of one, the needed files are looked up here, and
only their descriptions are fetched.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    DrainError,
    StoreError,
    StoreNotFoundError,
    is_other_format,
)
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Index, IndexRow, Manifest, Part, check_digest
from tiered_checkpoint_io.stores.base import ObjectInfo, Store, children_of

#: Servers may give times in whole seconds, and each by a clock of its own.
_COARSE_S = 2.0


class Files:
    """The files of one save; descriptions are read when they are asked for. For many threads."""

    def __init__(self, store: Store, content: Content, index: Index | None) -> None:
        """Takes the results of :func:`files_of`: the content lists the files if there is no index."""
        self._store = store
        self._content = content
        self._index = index
        self._read: dict[int, tuple[FileEntry, ...]] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file, by its path; reads no description."""
        if self._index is not None:
            return dict(self._index.paths)
        return {entry.path: entry.size for entry in self._content.files}

    def of_rank(self, rank: int) -> tuple[FileEntry, ...]:
        """Returns the files of one rank's part; of a checkpoint of one part, all of them, whichever rank is asked for.

        Raises CorruptCheckpointError if their description is missing, or is not the one that was committed.
        """
        if self._index is None:
            return self._content.files
        if len(self._index.rows) == 1:
            (rank,) = self._index.rows
        if rank not in self._read and rank in self._index.rows:
            name, save_id, digest = self._index.name, self._index.save_id, self._index.rows[rank].digest
            with _as_committed(f"{self._store.url}/{ids.description_key(save_id, rank)}"):
                self._read[rank] = read_description(self._store, name, save_id, rank, digest).content.files
        return self._read.get(rank, ())

    def entry(self, basename: str) -> FileEntry | None:
        """Returns one file; None if there is none of this basename. Raises as :meth:`of_rank`."""
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
        """Returns all files: reads all descriptions. Raises as :meth:`of_rank`."""
        if self._index is None:
            return self._content.files
        return tuple(entry for files in in_parallel(self.of_rank, self._index.rows) for entry in files)


def files_of(store: Store, content: Content) -> Files:
    """Returns the files of a save; CorruptCheckpointError if its index is missing, or is not the committed one."""
    if content.index is None:
        return Files(store, content, None)
    with _as_committed(where := f"{store.url}/{ids.index_key(content.save_id)}"):
        index = read_index(store, content.save_id, content.index.digest)
        if index.save_id != content.save_id:
            raise CorruptCheckpointError("the index of another save", operation="parse", key=where)
    return Files(store, content, index)


@contextlib.contextmanager
def _as_committed(where: str) -> Iterator[None]:
    """Raises CorruptCheckpointError if a document that the block reads for a manifest is missing or damaged."""
    try:
        yield
    except StoreNotFoundError as error:
        text = "this object is missing, and a manifest needs it"
        raise CorruptCheckpointError(text, operation="read", tier="durable", key=where) from error
    except CorruptCheckpointError as error:
        if is_other_format(error):
            raise
        raise CorruptCheckpointError(error.message, operation="read", tier="durable", key=where) from error


def written(store: Store, key: str) -> float:
    """Returns when an object was written, by the store's own clock; 0 if it is not there."""
    return max((entry.modified for entry in store.list(key) if entry.key == key), default=0.0)


def _listed(store: Store, manifest: Manifest) -> list[ObjectInfo] | None:
    """Returns the files of a checkpoint, by one list; None if they are being replaced, or lists are refused."""
    name, is_full = manifest.alias_of or manifest.name, manifest.content.kind == "full"
    try:
        found = list(store.list(name if is_full else f"{name}/"))
    except StoreError as error:
        if error.reason != "access":
            raise
        return None
    return None if manifest.previous else [each for each in found if not is_full or each.key == name]


def is_gone(store: Store, manifest: Manifest) -> bool:
    """Returns True if files of a committed checkpoint are not there: its owner, or a rule, deleted them. One list."""
    there, content = _listed(store, manifest), manifest.content
    # The sizes of many files suffice, so that no index is read.
    is_less = content.kind != "full" and sum(each.size for each in there or ()) < content.size
    return there is not None and (not there or is_less)


def is_edited(store: Store, manifest: Manifest) -> bool:
    """Returns True if a file was written after the manifest, which is the last write of a save, or has another size.

    Its bytes may be the same: after a copy of the whole tier, times are in any order.
    """
    there, content = _listed(store, manifest) or [], manifest.content
    last = written(store, ids.manifest_key(manifest.alias_of or manifest.name)) + _COARSE_S
    return any(each.modified > last or (content.kind == "full" and each.size != content.size) for each in there)


def read_if_there(store: Store, name: str) -> Manifest | None:
    """Does :func:`read_manifest`; returns None, too, for a checkpoint whose files are gone."""
    manifest = read_manifest(store, name)
    return None if manifest is None or is_gone(store, manifest) else manifest


def gone_of(store: Store, manifests: Collection[Manifest]) -> set[str]:
    """Returns names whose files are gone, by one list of each folder above them; of the newest, one file suffices."""
    wanted: dict[str, tuple[str, str]] = {}
    for each in manifests:
        folder, slash, last = (each.alias_of or each.name).rpartition("/")
        wanted[each.name] = folder + slash, last if each.content.kind == "full" else f"{last}/"
    there = {prefix: children_of(store, prefix) for prefix in {prefix for prefix, _ in wanted.values()}}
    gone = {name for name, (prefix, last) in wanted.items() if last not in there[prefix]}
    left = (each for each in manifests if each.name not in gone and each.content.resumable and not each.alias_of)
    newest_first = sorted(left, key=lambda each: each.content.order, reverse=True)
    return gone | {each.name for each in itertools.takewhile(functools.partial(is_gone, store), newest_first)}


def read_index(store: Store, save_id: str, digest: str = "") -> Index:
    """Returns the index of a save; raises as :func:`read_description`."""
    where = f"{store.url}/{ids.index_key(save_id)}"
    data = store.get(ids.index_key(save_id))
    if digest:
        check_digest(data, digest, "the index", key=where)
    return Index.from_json(data, where=where)


def read_description(store: Store, name: str, save_id: str, rank: int, digest: str = "") -> Part:
    """Returns a part, by its description.

    Raises CorruptCheckpointError unless the description has the ``digest``, if one is given, is of this part, and names
    files of its checkpoint only.
    """
    key = ids.description_key(save_id, rank)
    data, where = store.get(key), f"{store.url}/{key}"
    if digest:
        check_digest(data, digest, "the description of a part", key=where)
    part = Part.from_json(data, where=where)
    if (part.name, part.save_id, part.rank) != (name, save_id, rank):
        raise CorruptCheckpointError("the description of another part", operation="parse", tier="durable", key=where)
    check_paths(part)
    return part


def check_paths(part: Part) -> None:
    """Refuses a part that names files outside of the folder of its checkpoint."""
    for entry in part.content.files:
        if entry.path not in (part.name, f"{part.name}/{entry.basename}"):
            raise CorruptCheckpointError(f"file {entry.path!r} is not in the folder of its checkpoint", key=part.name)


def paths_in(store: Store, contents: Iterable[Content]) -> set[str] | None:
    """Returns the keys of all files of some contents; None if an index is damaged, so that they are unknown."""
    try:
        return {path for content in contents for path in files_of(store, content).sizes}
    except CorruptCheckpointError as error:
        if is_other_format(error):
            raise
        return None


#: Number of ranks that are named in an error.
_NAMED = 16


class Arrivals:
    """Parts seen so far; no part is asked for again once it was seen.

    Attributes:
        part: The coordinator's part.
        rows: The parts that are there, by rank; the coordinator's own is.
    """

    def __init__(self, part: Part) -> None:
        """Begins after :func:`commit.put_part`."""
        self.part = part
        self.rows = {part.rank: IndexRow.of(part)}

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts were not there at the last look."""
        return [rank for rank in range(self.part.content.parts) if rank not in self.rows]

    def late(self, timeout_s: float) -> DrainError:
        """Returns the error for a save of which no part has come for ``timeout_s`` seconds."""
        part, missing = self.part, self.missing
        named = ", ".join(map(str, missing[:_NAMED]))
        return DrainError(
            f"the parts of {len(missing)} of {part.content.parts} ranks are missing, and none of them has come for"
            f" {timeout_s:.0f} s: {named}{' ...' if len(missing) > _NAMED else ''}",
            operation="commit",
            tier="durable",
            key=ids.join_url(part.dirpath, part.name),
            rank=part.rank,
            step=part.content.step,
            hint="it is committed once they come; see the logs of those ranks and of the drains of their nodes",
        )

    def look(self, store: Store) -> bool:
        """Looks for the missing parts, by one list for each thousand of them, and reads their descriptions.

        Returns True if any has come since the last look. Raises CorruptCheckpointError if a description is damaged.
        """
        part, missing = self.part, self.missing
        prefixes = ids.description_prefixes(part.save_id, missing)
        there = {ids.rank_of_description(entry.key) for prefix in prefixes for entry in store.list(prefix)}
        new = [rank for rank in missing if rank in there]

        def read(rank: int) -> IndexRow:
            return IndexRow.of(read_description(store, part.name, part.save_id, rank))

        self.rows.update(zip(new, in_parallel(read, new), strict=True))
        return bool(new)
