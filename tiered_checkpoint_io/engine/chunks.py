"""Reading the chunks of a file, each verified as it is read: in memory, from a peer, or from the durable tier.

A *target* is ``(offset in the file, buffer)``. Bytes are read straight to their targets: each chunk is read once, in
pieces, and hashed while in cache. A target gets its bytes before the chunk's hash is known: if the hash differs, the
targets have undefined content, and are filled from another source, or the restore fails.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, StoreError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.parts import Incoming, StoredPart, reading
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import documents
from tiered_checkpoint_io.model.documents import chunk_size_for, new_hash
from tiered_checkpoint_io.model.manifest import FileEntry, Part
from tiered_checkpoint_io.stores.base import Readable, read_pieces
from tiered_checkpoint_io.stores.peer import PeerStore

#: Threads that hash: xxh3 at full speed saturates memory with few.
_HASH_THREADS = 4

#: Bytes that are read at once: still in the processor's cache when they are hashed, and enough for threads not to wait
#: for the interpreter instead.
PIECE_SIZE = 2 << 20

Span = tuple[int, int]
Target = tuple[int, memoryview]
#: Writes bytes to a place of a file.
Write = Callable[[memoryview, int], None]


def unverified(key: str, size: int) -> FileEntry:
    """Returns a file of which no hashes are known, to be read as others are."""
    return FileEntry(key, size, chunk_size_for(size), ())


def fetch_chunk(
    store: Readable, entry: FileEntry, index: int, chunk: memoryview, *, write: Write | None = None
) -> None:
    """Reads one chunk into ``chunk``; raises as :func:`fetch_pieces`.

    ``write`` writes to the file if ``chunk`` is a mapping of it whose pages were never touched.
    """
    base, starts = index * entry.chunk_size, range(0, len(chunk), PIECE_SIZE)
    if write is None:
        fetch_targets(store, entry, index, [(base, chunk)])
        return
    aside = memoryview(bytearray(min(PIECE_SIZE, len(chunk))))
    pieces = [aside[: len(chunk) - at] for at in starts]
    fetch_pieces(store, entry, index, pieces, lambda number: write(pieces[number], base + starts[number]))


def tier_of(store: Readable) -> str:
    """Returns the tier that a store is, for errors."""
    return str(getattr(store, "tier", "durable"))


class Copy(NamedTuple):
    """One copy of a file: the opener of the store that has it, and its path there."""

    store: Callable[[], Readable]
    path: str


class Copies:
    """The copies of one file, in the order in which to read them; for many threads.

    A copy of a peer that is damaged, silent or lost is not read again. A failure of the durable tier is an error.
    """

    def __init__(
        self,
        entry: FileEntry,
        copies: Iterable[Copy],
        skipped: Callable[[Readable, FileEntry, Exception], None] = lambda *_: None,
    ) -> None:
        """Takes the copies; ``skipped`` is called once for each that is not read again."""
        self.entry = entry
        self._left = list(copies)
        self._skipped = skipped
        self._why: list[str] = []
        self._lock = threading.Lock()

    def read(self, work: Callable[[Readable, FileEntry], None]) -> None:
        """Does ``work`` with the first copy for which it succeeds.

        Raises:
            CorruptCheckpointError: There is no such copy.
            StoreError: The durable tier could not be read.
        """
        while True:
            with self._lock:
                copy = self._left[0] if self._left else None
            if copy is None:
                why = "; ".join(self._why) or "no node has it"
                raise CorruptCheckpointError(why, operation="restore", tier="peer", key=self.entry.path)
            store, entry = copy.store(), replace(self.entry, path=copy.path)
            try:
                work(store, entry)
                return
            except (CorruptCheckpointError, StoreError) as error:
                if tier_of(store) == "durable":
                    raise
                with self._lock:
                    is_first = copy in self._left
                    if is_first:
                        self._left.remove(copy)
                        self._why.append(str(error))
                if is_first:
                    self._skipped(store, entry, error)

    def fetch(
        self,
        view: memoryview,
        *,
        concurrency: int,
        write: Write | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Reads the whole file, chunks in parallel; raises as :meth:`read`. ``progress`` gets each chunk's number."""
        ranges = self.entry.chunks

        def one(index: int) -> None:
            offset, length = ranges[index]
            chunk = view[offset : offset + length]
            self.read(lambda store, entry: fetch_chunk(store, entry, index, chunk, write=write))
            progress(index)

        in_parallel(one, range(len(ranges)), concurrency, as_needed=True)


def writer_to(descriptor: int) -> Write:
    """Returns a writer for a file with untouched pages: a write takes under half the time of touching them."""
    # The kernel lets one thread at a time write to a file; waiting threads would spin.
    turn = threading.Lock()

    def write(data: memoryview, offset: int) -> None:
        with turn:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset + done)

    return write


def fetch_pieces(
    store: Readable,
    entry: FileEntry,
    index: int,
    pieces: Sequence[memoryview],
    arrived: Callable[[int], None] = lambda _: None,
) -> None:
    """Reads one chunk into buffers, one after the other, each hashed as soon as it is full.

    ``pieces`` are as long, in all, as the chunk; one buffer may be there several times. ``arrived`` is called with the
    number of each full buffer, before the next one is filled.

    Raises:
        CorruptCheckpointError: The object is short, or the chunk differs from its hash, if it has one.
        StoreError: The object could not be read.
    """
    digest = new_hash()

    def filled(number: int) -> None:
        if number == 0:
            # If the request is repeated, so is this.
            digest.reset()
        if entry.hashes:
            digest.update(pieces[number])
        arrived(number)

    if pieces:
        read_pieces(store, entry.path, index * entry.chunk_size, pieces, filled)
    if entry.hashes:
        entry.check_digest(index, digest.hexdigest(), tier=tier_of(store), where=f"{store.url}/{entry.path}")


def verify(
    entry: FileEntry,
    view: memoryview,
    *,
    where: str,
    indices: Iterable[int] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Compares a file's chunks in memory with their hashes; raises CorruptCheckpointError if one differs.

    ``indices`` selects chunks. ``where`` is the file's place, for errors. ``progress`` gets the size of each chunk that
    matches, from any thread.
    """
    ranges = entry.chunks

    def one(index: int) -> None:
        offset, length = ranges[index]
        entry.check_chunk(index, view[offset : offset + length], tier="memory", where=where)
        progress(length)

    in_parallel(one, range(len(ranges)) if indices is None else indices, _HASH_THREADS)


def quarantine_damaged(tier: MemoryTier, stored: StoredPart) -> None:
    """Verifies a part with bytes that arrived damaged, and quarantines the part if it is damaged here."""
    with contextlib.suppress(CheckpointNotFoundError, OSError):
        try:
            with reading(stored) as views:
                for entry in stored.part.content.files:
                    verify(entry, views[entry.basename], where=str(stored.file(entry.basename)))
        except CorruptCheckpointError as error:
            tier.quarantine(stored.folder, str(error))


def chunks_of(entry: FileEntry, spans: Iterable[Span]) -> list[int]:
    """Returns the chunks of a file that ``(offset, length)`` spans touch, in their order.

    Raises CorruptCheckpointError if a span reaches beyond the file.
    """
    wanted: set[int] = set()
    for offset, length in spans:
        if offset < 0 or offset + length > entry.size:
            raise CorruptCheckpointError(
                f"{entry.path} has {entry.size} bytes, .metadata names bytes up to {offset + length}",
                operation="restore",
                key=entry.path,
            )
        if length:
            wanted.update(range(offset // entry.chunk_size, (offset + length - 1) // entry.chunk_size + 1))
    return sorted(wanted)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Returns fewer spans that touch the same chunks of any file: a gap between two holds no whole chunk."""
    found: list[Span] = []
    for offset, length in sorted(spans):
        begin, end = (found[-1][0], sum(found[-1])) if found else (offset, offset)
        if length and found and offset - end < documents.MIN_CHUNK_SIZE:
            found[-1] = begin, max(end, offset + length) - begin
        elif length:
            found.append((offset, length))
    return found


def by_chunk(entry: FileEntry, targets: Collection[tuple[int, Any]]) -> dict[int, list[tuple[int, Any]]]:
    """Returns the chunks that targets lie in, and the parts of targets in each, in the order of the file.

    The targets are disjoint, in any order; instead of a buffer, they may have any object with a length and slices.
    Raises CorruptCheckpointError if one reaches beyond the file.
    """
    found: defaultdict[int, list[tuple[int, Any]]] = defaultdict(list)
    for offset, buffer in sorted(targets, key=lambda target: target[0]):
        for index in chunks_of(entry, [(offset, len(buffer))]):
            start = index * entry.chunk_size
            low, high = max(offset, start), min(offset + len(buffer), start + entry.chunk_size)
            found[index].append((low, buffer[low - offset : high - offset]))
    return found


class OpenFile:
    """A file of this node as a store.

    The file is read, not mapped: page faults and the end of the mapping would take a third of the time.
    """

    tier = "memory"

    def __init__(self, descriptor: int, folder: str) -> None:
        """Takes the open file, and its folder for errors."""
        self._descriptor, self.url = descriptor, folder

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills a buffer; raises CorruptCheckpointError if the file is short."""
        while len(buffer):
            count = os.preadv(self._descriptor, [buffer], offset)
            if not count:
                raise CorruptCheckpointError("the file is short", operation="restore", tier="memory", key=key)
            buffer, offset = buffer[count:], offset + count

    def read_pieces(self, key: str, offset: int, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        """Fills several buffers: see :func:`stores.base.read_pieces`."""
        for index, piece in enumerate(pieces):
            self.read_into(key, offset, piece)
            offset += len(piece)
            filled(index)


def fetch_targets(
    store: Readable,
    entry: FileEntry,
    index: int,
    targets: Sequence[Target],
    arrived: Callable[[int], None] = lambda _: None,
) -> None:
    """Reads a chunk, each byte once, and fills targets in it, see :func:`by_chunk`; further as :func:`fetch_pieces`."""
    at, size = entry.chunks[index]
    # Lengths and targets of the chunk's bytes, in their order; None for bytes that are only hashed.
    parts: list[tuple[int, memoryview | None]] = []
    for start, buffer in (*targets, (at + size, memoryview(b""))):
        parts += [(start - at, None), (len(buffer), buffer)]
        at = start + len(buffer)
    aside = memoryview(bytearray(min(PIECE_SIZE, max(length for length, to in parts if to is None))))
    pieces = [
        (aside if to is None else to[low:])[: min(PIECE_SIZE, length - low)]
        for length, to in parts
        for low in range(0, length, PIECE_SIZE)
    ]
    fetch_pieces(store, entry, index, pieces, arrived)


#: Ranges of one peer that are read at once.
RANGES = 4


class SlotDestination:
    """Slots of a memory tier, in which a part becomes this node's."""

    #: The part, as other nodes see it until it is there.
    _incoming: Incoming | None = None

    def __init__(
        self, tier: MemoryTier, part: Part, *, drained: bool = False, acquire: Callable[[int], Slot] | None = None
    ) -> None:
        """Takes no room yet.

        ``tier`` is this node's memory, or its replicas. With ``drained``, this node need not upload the part.
        ``acquire`` returns a slot of a size, as the tier's function does by default.
        """
        self._tier = tier
        self._part = part
        self._drained = drained
        self._acquire = acquire or tier.acquire
        self._slots: dict[str, Slot] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[str, memoryview]]:
        """Makes room for the part's files, by basename."""
        views: dict[str, memoryview] = {}
        files = self._part.content.files
        with contextlib.ExitStack() as held:
            for entry in files:
                slot = self._slots[entry.basename] = self._acquire(max(1, entry.size))
                views[entry.basename] = held.enter_context(slot.view)
            with contextlib.suppress(OSError):
                paths = [self._slots[entry.basename].path for entry in files]
                self._incoming = Incoming.show(self._tier.root, self._part, paths)
            yield views

    def arrived(self, number: int, chunk: int) -> None:
        """Takes note that a chunk of a file is there, and verified."""
        if self._incoming is not None:
            self._incoming.mark(number, chunk)

    def writer(self, basename: str) -> Write | None:
        """Returns a writer for a file of which no page was touched yet; None for another file."""
        slot = self._slots[basename]
        if slot.touched:
            return None
        # The next part finds all pages there: it is read straight into the mapping, without a second copy.
        slot.touched = slot.reserved
        return writer_to(slot.descriptor)

    def keep(self) -> StoredPart:
        """Makes the part exist, once all files have arrived and :meth:`open`'s block has ended."""
        try:
            return self._tier.commit(self._part, self._slots, drained=self._drained, saved=False)
        except MemoryFullError:
            # The tier has given up the slots as well.
            self._slots.clear()
            raise
        finally:
            self._hide()

    def drop(self) -> None:
        """Frees the part's room."""
        self._hide()
        for slot in self._slots.values():
            self._tier.give_back(slot)
        self._slots.clear()

    def _hide(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.close()


def describe(store: PeerStore, save_id: str, rank: int) -> Part:
    """Returns the description of a part that a peer holds.

    Raises StoreError if the peer does not answer, CorruptCheckpointError if this release can't understand the answer.
    """
    key = f"{save_id}/{rank}"
    part = Part.from_json(store.get(key), where=f"{store.url}/{key}")
    if (part.save_id, part.rank) != (save_id, rank):
        raise CorruptCheckpointError("the peer describes another part", key=f"{store.url}/{key}")
    return part


def copies_at(
    part: Part,
    number: int,
    stores: Sequence[PeerStore],
    further: Iterable[Copy] = (),
    note: Callable[[str], None] = lambda _: None,
) -> Copies:
    """Returns the copies of a part's file, by its number, that peers hold, and after these the ``further`` ones.

    ``note`` gets the reason why a copy is not taken; if a peer's copy is damaged, its node is to verify it.
    """

    def skipped(store: Readable, entry: FileEntry, error: Exception) -> None:
        note(f"{store.url}: {error}")
        if isinstance(store, PeerStore) and isinstance(error, CorruptCheckpointError):
            store.report_damage(entry.path)

    key = f"{part.save_id}/{part.rank}/{number}"
    held = [Copy(lambda store=store: store, key) for store in stores]  # type: ignore[misc]
    return Copies(part.content.files[number], [*held, *further], skipped)


def read_part(
    copies: Iterable[Copies],
    destination: SlotDestination,
    *,
    concurrency: int = RANGES,
    progress: Callable[[int], None] = lambda _: None,
) -> StoredPart:
    """Reads a part whole, verified, from the copies of each of its files.

    ``progress`` is called with the number of each chunk that has come, from any thread.

    Raises:
        CorruptCheckpointError: No copy of some file is intact.
        StoreError: The durable tier could not be read.
        MemoryTierError: There is no room for the part, or its place is taken.
    """
    try:
        with destination.open() as views:
            for number, each in enumerate(copies):

                def arrived(chunk: int, number: int = number) -> None:
                    destination.arrived(number, chunk)
                    progress(chunk)

                name = each.entry.basename
                write = destination.writer(name)
                each.fetch(views[name], concurrency=concurrency, write=write, progress=arrived)
        return destination.keep()
    except BaseException:
        destination.drop()
        raise
