"""Reading a sharded checkpoint: all ranks agree on one, and each reads only the bytes it needs, all of them verified.

Rank 0 chooses the checkpoint for all: see ``search``. It also reads ``.metadata``, which grows with tensors and ranks,
and sends it with the choice. The tensors' bytes are read later, by each rank for itself.

A file is in this node's memory as a rank's part, or is fetched from a peer or the durable tier, a hashed chunk at a
time. Chunks that several ranks of the node read go into a file that all of them map. If memory has no room for them,
each rank reads them for itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tiered_checkpoint_io.engine.chunks import (
    Copies,
    Copy,
    OpenFile,
    Span,
    Target,
    by_chunk,
    chunks_of,
    fetch_targets,
    unverified,
    verify,
)
from tiered_checkpoint_io.engine.durable.files import Files, files_of
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Found, Tier
from tiered_checkpoint_io.engine.restore.peers import Peers, adopt_orphans
from tiered_checkpoint_io.engine.restore.search import Attempt, Ready, Search
from tiered_checkpoint_io.engine.restore.shared_reads import FetchedFile, SharedFolder, folder_for_files
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from tiered_checkpoint_io.formats.image import default_threads
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.logs import of_step
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import StoredPart, mapped, opened
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, FileEntry

_T = TypeVar("_T")


@dataclass(slots=True)
class _HeldFile:
    """A file of a part in this node's memory, and its verified chunks; has methods of :class:`FetchedFile`."""

    stored: StoredPart
    entry: FileEntry
    file: OpenFile
    view: memoryview
    verified: set[int] = field(default_factory=set)

    def ensure(self, spans: Iterable[Span]) -> memoryview:
        needed = [index for index in chunks_of(self.entry, spans) if index not in self.verified]
        verify(self.entry, self.view, where=f"{self.file.url}/{self.entry.path}", indices=needed)
        self.verified.update(needed)
        return self.view

    def fill(self, targets: Sequence[Target]) -> None:
        wanted = by_chunk(self.entry, targets)

        def one(index: int) -> None:
            if index not in self.verified:
                fetch_targets(self.file, self.entry, index, wanted[index])
                return
            for offset, buffer in wanted[index]:
                self.file.read_into(self.entry.path, offset, buffer)

        in_parallel(one, wanted, default_threads())
        self.verified.update(wanted)

    def begin(self, _: Iterable[Span]) -> int:
        return default_threads()


class ShardFiles:
    """All files of one save, as this rank reads them."""

    def __init__(self, tiers: Tiers, candidate: Candidate, *, readers: int = 1, peers: Peers | None = None) -> None:
        """Joins the other readers of this node until :meth:`close`; memory's parts are read after :meth:`hold`.

        ``readers`` ranks of this node share the requests that may be in flight. ``peers`` are closed with this object.
        """
        self._tiers = tiers
        self._content = candidate.durable
        self._concurrency = max(1, tiers.config.read_concurrency() // readers)
        self._alone = readers == 1
        self._also_read: Mapping[str, Collection[int]] | None = None
        self._expected: dict[str, FileEntry] = {}
        self._exits = contextlib.ExitStack()
        self._peers = peers
        if peers is not None:
            self._exits.callback(peers.close)
        self._held: dict[str, _HeldFile] = {}
        self._fetched: dict[str, FetchedFile] = {}
        url = ids.join_url(tiers.dirpath, candidate.name)
        self._save_id = candidate.save_id
        key = candidate.save_id or hashlib.sha256(url.encode()).hexdigest()[:32]
        folder = SharedFolder(tiers.memory.root, key, tiers.clock)
        self._exits.callback(folder.close)
        #: Folder of chunks that several ranks read; if memory has no room for them, of files of this rank only.
        self._folder, self._has_room = folder.path, True

    def hold(self) -> None:
        """Keeps the parts of the save that this node's memory has now, until :meth:`close`."""
        known = {file.stored.part.rank for file in self._held.values()}
        for stored in self._tiers.memory.held():
            if stored.save_id == self._save_id and stored.part.rank not in known:
                self._hold(stored)

    def _hold(self, stored: StoredPart) -> None:
        try:
            descriptors = self._exits.enter_context(opened(stored))
        except CorruptCheckpointError as error:
            self._tiers.quarantine(stored, error)
        except CheckpointNotFoundError as error:
            self._tiers.log.warning("%s: %s", stored.part.name, error)
        else:
            for entry in stored.part.content.files:
                descriptor, here = descriptors[entry.basename], replace(entry, path=entry.basename)
                file = OpenFile(descriptor, str(stored.file(entry.basename).parent))
                self._held[entry.basename] = _HeldFile(stored, here, file, mapped(descriptor))

    @property
    def rejected(self) -> list[str]:
        """Copies of other nodes that were not taken, and the reasons."""
        return self._peers.rejected if self._peers is not None else []

    @property
    def held(self) -> dict[str, FileEntry]:
        """The files in this node's memory, by basename."""
        return {basename: file.entry for basename, file in self._held.items()}

    def small(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the sizes of the files that every rank needs, by basename: of the names, else on the durable tier."""
        entries = {name: self.held.get(name) or self._entry(name) for name in names if _is_small(name)}
        if METADATA in entries:
            return {name: entry.size for name, entry in entries.items() if entry is not None}
        there = self.durable.sizes if self.durable is not None else {}
        sizes = {path.rpartition("/")[2]: size for path, size in there.items()}
        return {name: size for name, size in sizes.items() if _is_small(name)}

    @functools.cached_property
    def durable(self) -> Files | None:
        """Files of the save on the durable tier, read when needed; None if the save is not there."""
        return files_of(self._tiers.store(), self._content) if self._content is not None else None

    def expect(self, entry: FileEntry) -> None:
        """Expects a file that another tool wrote, so that no manifest names it."""
        self._expected.setdefault(entry.basename, entry)

    def ensure(self, basename: str, spans: Iterable[Span]) -> memoryview:
        """Returns the file, of which at least ``(offset, length)`` spans are here and verified.

        Raises:
            CorruptCheckpointError: No intact copy is within reach.
            CheckpointNotFoundError, StoreError, MemoryFullError, RestoreError: See :meth:`FetchedFile.ensure`.
        """
        spans = list(spans)
        return self._with(basename, lambda file: file.ensure(spans))

    def fill(self, basename: str, targets: Sequence[Target]) -> None:
        """Fills targets with bytes of a file, all of them verified, and copied once; see :mod:`chunks`.

        Raises as :meth:`ensure`; the targets then hold anything.
        """
        self._with(basename, lambda file: file.fill(targets))

    def begin(self, basename: str, spans: Iterable[Span]) -> tuple[FileEntry, int]:
        """Prepares to :meth:`fill` targets of a file in several calls, within the ``(offset, length)`` spans.

        Chunks that other ranks of this node read too are fetched now, by all of these ranks at once. Returns the file,
        and how many of its chunks :meth:`fill` reads at once; each chunk is read once if each call has all targets of
        its chunks. Raises as :meth:`ensure`.
        """
        spans = list(spans)
        return self._with(basename, lambda file: (file.entry, file.begin(spans)))

    def share(self, spans: Mapping[str, Iterable[Span]]) -> None:
        """Takes the spans that other ranks of this node will read: only their chunks need a shared place."""
        entries = {basename: self._entry(basename) for basename in spans if basename not in self._held}
        self._also_read = {
            name: set(chunks_of(entry, spans[name])) for name, entry in entries.items() if entry is not None
        }

    def _reads_alone(self, basename: str, index: int) -> bool:
        if self._also_read is None or not self._has_room:
            return self._alone or not self._has_room
        return index not in self._also_read.get(basename, ())

    def _with(self, basename: str, work: Callable[[_HeldFile | FetchedFile], _T]) -> _T:
        """Works on a file in this node's memory; if it is damaged or not there, on one that is fetched."""
        if basename in self._held:
            try:
                return work(self._held[basename])
            except CorruptCheckpointError as error:
                self._tiers.quarantine(self._held.pop(basename).stored, error)
                if self._entry(basename) is None:
                    raise
        try:
            return work(self._fetched_file(basename))
        except MemoryFullError:
            if not self._has_room:
                raise
            # Bytes that were read from the earlier files stay valid: the files are closed at the end.
            self._folder, self._has_room, self._fetched = folder_for_files(self._tiers.memory, 0), False, {}
            return work(self._fetched_file(basename))

    def _fetched_file(self, basename: str) -> FetchedFile:
        fetched = self._fetched.get(basename)
        if fetched is None:
            fetched = self._fetched[basename] = FetchedFile(
                self._copies(basename),
                self._folder,
                is_private=not self._has_room,
                concurrency=self._concurrency,
                timeout_s=float(self._tiers.config.support.wait_timeout_s),
                reads_alone=functools.partial(self._reads_alone, basename),
                clock=self._tiers.clock,
            )
            self._exits.callback(fetched.close)
        return fetched

    def _entry(self, basename: str) -> FileEntry | None:
        """Returns a file that is not in this node's memory; None if no other source has it either."""
        entry = self._expected.get(basename)
        if entry is None and self._peers is not None:
            entry = self._peers.entry(basename)
        return entry if entry is not None or self.durable is None else self.durable.entry(basename)

    def _copies(self, basename: str) -> Copies:
        entry = self._entry(basename)
        if entry is None:
            raise CorruptCheckpointError(
                f"{basename} is in no node's memory, and not on the durable tier",
                operation="restore",
                key=basename,
            )
        durable = [Copy(self._tiers.store, entry.path)] if self._content is not None else []
        return self._peers.copies(entry, durable) if self._peers is not None else Copies(entry, durable)

    def close(self) -> None:
        """Lets all files go."""
        self._held.clear()
        self._fetched.clear()
        self._exits.close()


def _is_small(basename: str) -> bool:
    return not basename.endswith(".distcp")


@dataclass(slots=True, kw_only=True)
class OpenShards(Found):
    """A sharded checkpoint that all ranks have agreed on; held on this node until it is closed.

    Attributes:
        small: ``.metadata`` until it is parsed, and the other small files, by name; verified if they have hashes.
        files: The shards' bytes; None if they are not read piece by piece.
        sharing: Each rank's node, if its bytes are elsewhere, and several ranks of a node read them.
    """

    small: dict[str, bytes | memoryview] = field(default_factory=dict)
    files: ShardFiles | None = None
    sharing: list[str] = field(default_factory=list)

    @property
    def metadata(self) -> bytes | memoryview:
        """The content of ``.metadata``."""
        return self.small[METADATA]

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Expects files of these sizes, which ``.metadata`` names, if another tool wrote them, without a manifest."""
        if self.content is None and self.files is not None:
            for basename, size in sizes.items():
                self.files.expect(unverified(f"{self.name}/{basename}", size))

    def close(self) -> None:
        """Lets the files go."""
        if self.files is not None:
            self.files.close()


def open_shards(
    ready: Ready, group: Group, take: Callable[[OpenShards], None], rejected: Mapping[str, str] | None = None
) -> OpenShards:
    """Chooses a sharded checkpoint; every rank of ``group`` calls this, and all get the same, or the same error.

    ``take`` is called with the open checkpoint; if it finds damage on some rank, all try the next one. ``rejected`` has
    the ids of saves that this rank can't take, and the reasons.

    Raises as :func:`restore.restore_local`.
    """
    with contextlib.closing(_Opener(group, take)) as opener:
        search = opener.search
        opened = search.run(ready, opener.open, rejected)
    if opened is None:
        raise search.nothing
    if group.rank == 0:
        search.tiers.log.info("%sloading %s", of_step(opened.step), opened.name)
        if opened.content is not None:
            search.tiers.say_whose(opened.content)
    return opened


def share_reads(spans: Sequence[Mapping[str, list[Span]]], nodes: Sequence[str]) -> list[dict[str, list[Span]]]:
    """Returns for each rank the spans, of files that it reads itself, that other ranks of its node read; pure.

    ``spans`` has the ``(offset, length)`` spans that each rank reads, by file.
    """
    shared: list[defaultdict[str, list[Span]]] = []
    for rank, (mine, node) in enumerate(zip(spans, nodes, strict=True)):
        shared.append(defaultdict(list))
        for other, theirs in enumerate(spans):
            if nodes[other] == node and other != rank:
                for basename in theirs.keys() & mine.keys():
                    shared[rank][basename] += theirs[basename]
    return [dict(each) for each in shared]


class _Opener:
    """Opens a candidate on all ranks."""

    def __init__(self, group: Group, take: Callable[[OpenShards], None]) -> None:
        self.search = Search("sharded", group, self._prepare)
        self._take = take
        #: Files that are open, but not all ranks have taken them.
        self._files: ShardFiles | None = None

    def close(self) -> None:
        """Closes files that not all ranks have taken."""
        files, self._files = self._files, None
        if files is not None:
            files.close()

    def _join(self, candidate: Candidate) -> ShardFiles:
        search, readers = self.search, self.search.nodes.count(self.search.node)
        if self._files is None:
            peers = search.peers(candidate) if self._is_scattered(candidate) else None
            self._files = ShardFiles(search.tiers, candidate, readers=readers, peers=peers)
        self._files.hold()
        return self._files

    def _is_scattered(self, candidate: Candidate) -> bool:
        return candidate.in_memory and self.search.group.has_other_nodes

    def _prepare(self, candidate: Candidate) -> Attempt[dict[str, bytes]]:
        """Reads the small files for all ranks, on rank 0: they grow with tensors and ranks."""

        def read() -> dict[str, bytes]:
            files = self._join(candidate)
            sizes = files.small(candidate.files)
            small = {name: bytes(files.ensure(name, [(0, size)])[:size]) for name, size in sizes.items()}
            if METADATA not in small:
                raise CorruptCheckpointError(f"there is no {METADATA}", operation="restore")
            return small

        self.close()
        return self.search.attempt(candidate, _source(candidate), read)

    def open(self, candidate: Candidate) -> OpenShards | None:
        """Opens a candidate; every rank calls this, and all get None if it is damaged on some rank."""
        search, nodes, is_scattered = self.search, self.search.nodes, self._is_scattered(candidate)
        opened = OpenShards(
            name=candidate.name,
            dirpath=search.tiers.dirpath,
            content=None if candidate.is_foreign else candidate.content,
            rejected=search.rejected,
            newest_save_id=search.newest,
            small=search.prepared,
            sharing=nodes if (is_scattered or not candidate.in_memory) and len(set(nodes)) < len(nodes) else [],
            is_durable=candidate.durable is not None,
        )

        def take() -> bool:
            opened.files = self._join(candidate)
            # If several nodes hold the checkpoint in memory, this node may hold none of it.
            opened.tier = "memory" if opened.files.held else "peer" if is_scattered else "durable"
            self._take(opened)
            return True

        taken = search.share(lambda: search.attempt(candidate, _source(candidate), take))
        if not all(taken):
            self.close()
            return None
        self._files = None
        if search.leads:
            # Only now: all ranks of this node have opened their files.
            adopt_orphans(search.tiers, candidate, search.node)
        return opened


def _source(candidate: Candidate) -> Tier:
    return "memory" if candidate.in_memory else "durable"
