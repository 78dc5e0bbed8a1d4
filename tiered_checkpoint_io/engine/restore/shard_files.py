"""The bytes of a sharded checkpoint, as one rank reads them: only what it needs, and all of it verified.

A file lies in this node's memory as a rank's part, or is fetched from the durable tier, a hashed
chunk at a time, into a file that all ranks of the node map. A rank for whose chunks memory has no
room has them in a private folder for temporary files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.durable.files import Files
from tiered_checkpoint_io.engine.restore.shared_reads import FetchedFile, SharedFolder, Span, chunks_of
from tiered_checkpoint_io.errors import CorruptCheckpointError, MemoryFullError
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store

_VERIFIED = 1


class PartFile:
    """A file of a part in this node's memory, verified where it is read."""

    def __init__(self, entry: FileEntry, view: memoryview, where: str) -> None:
        self.entry = entry
        self.view = view
        self._where = where
        self._verified = bytearray(len(entry.chunks))

    def ensure(self, spans: Iterable[Span]) -> None:
        """Verifies the chunks that ``(offset, length)`` spans lie in.

        Raises:
            CorruptCheckpointError: One differs from its hash.
        """
        needed = [index for index in chunks_of(self.entry, spans) if not self._verified[index]]
        chunks.verify(self.entry, self.view, where=self._where, indices=needed)
        for index in needed:
            self._verified[index] = _VERIFIED


class ShardFiles:
    """All files of one save, as this rank reads them."""

    def __init__(
        self,
        tier: MemoryTier,
        store: Callable[[], Store],
        key: str,
        *,
        durable: Callable[[], Files] | None,
        concurrency: int,
        timeout_s: float,
        on_damage: Callable[[StoredPart, CorruptCheckpointError], None],
        clock: Clock = SYSTEM,
    ) -> None:
        """Joins the other readers of this node.

        Args:
            tier: This node's memory.
            store: Opens the durable tier.
            key: The save's id, or another name for what is read.
            durable: Gives the files that the durable tier has of it; called when one of them is needed. None where
                the save is not there.
            concurrency: Requests in flight at once.
            timeout_s: See :class:`FetchedFile`.
            on_damage: Called with a damaged part in memory; the durable copy is taken in its place.
            clock: For waits.
        """
        self._tier = tier
        self._store = store
        self._durable = durable
        self._adopted: dict[str, FileEntry] = {}
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._on_damage = on_damage
        self._clock = clock
        self._held = ExitStack()
        self._parts: dict[str, tuple[StoredPart, PartFile]] = {}
        self._fetched: dict[str, FetchedFile] = {}
        self._private: Path | None = None
        self._folder = SharedFolder(tier.root, key, clock)
        self._held.callback(self._folder.close)

    def hold(self, stored: StoredPart) -> None:
        """Keeps a part of this save in this node's memory until :meth:`close`.

        Raises:
            CheckpointNotFoundError: It was removed meanwhile.
            CorruptCheckpointError: A file of it is missing, or has another size.
        """
        views = self._held.enter_context(self._tier.reading(stored))
        for entry in stored.part.content.files:
            file = PartFile(entry, views[entry.basename], str(stored.file(entry.basename)))
            self._parts[entry.basename] = (stored, file)

    @property
    def held(self) -> dict[str, FileEntry]:
        """The files that lie in this node's memory, by basename."""
        return {basename: file.entry for basename, (_, file) in self._parts.items()}

    def is_durable(self, basename: str) -> bool:
        """Whether a file is on the durable tier; raises as :meth:`ensure`."""
        return self._durable is not None and self._durable().entry(basename) is not None

    def check(self, basename: str, spans: Iterable[Span]) -> CorruptCheckpointError | None:
        """Verifies spans of a file in this node's memory; what is damaged is no longer held, and given back as such."""
        if basename not in self._parts:
            return None
        stored, file = self._parts[basename]
        try:
            file.ensure(spans)
        except CorruptCheckpointError as error:
            del self._parts[basename]
            self._on_damage(stored, error)
            return error
        return None

    def peek(self, basename: str, offset: int, length: int) -> memoryview:
        """Bytes of a file in this node's memory, which whoever gets them has to verify."""
        return self._parts[basename][1].view[offset : offset + length]

    def adopt(self, entry: FileEntry) -> None:
        """Reckons with a file whose chunks :meth:`put` brings."""
        self._adopted.setdefault(entry.basename, entry)

    def put(self, basename: str, index: int, data: bytes | memoryview) -> None:
        """Takes a chunk of an adopted file; see :meth:`FetchedFile.put`."""
        try:
            self._fetch_file(basename).put(index, data)
        except MemoryFullError as error:
            self._leave_memory(error)
            self._fetch_file(basename).put(index, data)

    def ensure(self, basename: str, spans: Iterable[Span]) -> memoryview:
        """The file, of which at least ``(offset, length)`` spans are here and verified.

        Raises:
            CorruptCheckpointError: No intact copy is within reach.
            CheckpointNotFoundError, StoreError, MemoryFullError, RestoreError: See
                :meth:`FetchedFile.ensure`.
        """
        spans = list(spans)
        error = self.check(basename, spans)
        if error is not None and self._entry(basename) is None:
            raise error
        if basename in self._parts:
            return self._parts[basename][1].view
        try:
            fetched = self._fetch_file(basename)
            fetched.ensure(spans)
        except MemoryFullError as error:
            self._leave_memory(error)
            fetched = self._fetch_file(basename)
            fetched.ensure(spans)
        return fetched.view

    def _leave_memory(self, error: MemoryFullError) -> None:
        """Goes on in a private folder for temporary files, with what is here.

        Raises:
            MemoryFullError: It was that folder that had no space.
        """
        if self._private is not None:
            raise error
        self._private = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="tiered-reads-")))
        # Whoever reads from the earlier files goes on to do so: they are closed at the end.
        earlier, self._fetched = self._fetched, {}
        for basename, file in earlier.items():
            for index, data in file.here():
                self._fetch_file(basename).put(index, data)

    def _fetch_file(self, basename: str) -> FetchedFile:
        fetched = self._fetched.get(basename)
        if fetched is None:
            entry = self._entry(basename)
            if entry is None:
                raise CorruptCheckpointError(
                    f"{basename} is in no node's memory, and not on the durable tier",
                    operation="restore",
                    key=basename,
                )
            fetched = self._fetched[basename] = FetchedFile(
                entry,
                self._store,
                self._private or self._folder.path,
                concurrency=self._concurrency,
                timeout_s=self._timeout_s,
                clock=self._clock,
            )
            self._held.callback(fetched.close)
        return fetched

    def _entry(self, basename: str) -> FileEntry | None:
        """A file that is not in this node's memory; None where it is not on the durable tier either."""
        adopted = self._adopted.get(basename)
        if adopted is not None or self._durable is None:
            return adopted
        return self._durable().entry(basename)

    def close(self) -> None:
        """Lets everything go."""
        self._parts.clear()
        self._fetched.clear()
        self._held.close()
