"""A checkpoint's file of one part on one node: verified in its memory, or fetched to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.ranks.transfer import SlotPlace, find_part
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Tier
from tiered_checkpoint_io.engine.restore.search import Found, Outcome, Search
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, MemoryTierError
from tiered_checkpoint_io.logs import gib, rate
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part


@dataclass(slots=True, kw_only=True)
class Restored(Found):
    """A checkpoint's file that lies, verified, on this node, and stays there until it is released.

    Attributes:
        tier: Where this node had it from.
        path: The local file.
        seconds: How long it took to find, fetch and verify.
        bytes_read: Bytes that this process read from the durable tier.
    """

    tier: Tier
    path: Path
    seconds: float = 0.0
    bytes_read: int = 0
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    def __enter__(self) -> Restored:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets the file go. What was mapped from it meanwhile lives on, unchanged."""
        self._held.close()


@dataclass(slots=True)
class FetchedPart:
    """A part's file on this node, verified.

    Attributes:
        part: What it is, with the hashes.
        path: The file.
        tier: Where it came from.
        bytes_read: Bytes that were read from the durable tier.
        temporary: Whether the file is to be unlinked once it is open.
    """

    part: Part
    path: str
    tier: Tier
    bytes_read: int = 0
    temporary: bool = False


class NodeFetcher:
    """Verifies and fetches for one node."""

    def __init__(self, tiers: Tiers, *, part_rank: int | None = None) -> None:
        """Takes the tiers.

        Args:
            tiers: Where to look, and where to put what is fetched.
            part_rank: Which rank's part to fetch, of a checkpoint where each has one file; None where
                there is one file in all.
        """
        self._tiers = tiers
        self._tier = tiers.memory
        self._rank = part_rank

    def fetch(self, candidate: Candidate, tier: Tier, search: Search) -> Outcome[FetchedPart]:
        """The file from this node's memory, or from the durable tier. Never raises."""

        def read() -> FetchedPart:
            # Files of several ranks do not wait for each other.
            with self._tiers.lock("" if self._rank is None else f"-{self._rank}"):
                if tier == "memory":
                    return self.from_memory(candidate.save_id)
                # Another process of this node may have fetched it while we waited for the lock.
                with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
                    return self.from_memory(candidate.save_id)
                return self.from_durable(candidate)

        return search.attempt(candidate, tier, read)

    def from_memory(self, save_id: str) -> FetchedPart:
        """The file in this node's memory.

        Raises:
            CheckpointNotFoundError: It is not there.
            CorruptCheckpointError: It is damaged, and in quarantine now.
        """
        stored = self.find(save_id)
        (entry,) = stored.part.content.files
        with self._tiers.verified(stored, lambda _: True):
            return FetchedPart(stored.part, str(stored.file(entry.basename)), "memory")

    def adopt(self, save_id: str) -> FetchedPart:
        """The file in this node's memory, which is its own from now on and not a replica."""
        stored = self.find(save_id)
        if stored.is_replica:
            stored = self._tier.adopt(stored, drained=False)
        return FetchedPart(stored.part, str(stored.file(stored.part.content.files[0].basename)), "memory")

    def from_durable(self, candidate: Candidate) -> FetchedPart:
        """The file from the durable tier, in this node's memory, or a temporary file where that has no room.

        Raises:
            CorruptCheckpointError: It is damaged, or what lists it is.
            StoreError: It could not be read.
        """
        content, name = candidate.durable, candidate.name
        assert content is not None
        store = self._tiers.store()
        # Of a checkpoint of several parts, the index and the description of one part tell it.
        files = files_of(store, content).of_rank(self._rank or 0)
        if len(files) != 1:
            whose = "" if self._rank is None else f" of shard {self._rank}"
            raise CorruptCheckpointError(
                f"its manifest names {len(files)} files{whose}, not one", operation="restore", key=content.save_id
            )
        (entry,) = files
        content = replace(content, files=files, index=None)
        part = Part(name, self._rank or 0, content, self._tiers.dirpath, durable=True)
        if candidate.is_foreign and ids.url_scheme(self._tiers.dirpath) is None:
            # A local file needs no copy: nothing of it is kept mapped.
            return FetchedPart(part, str(Path(self._tiers.dirpath, entry.path)), "durable")
        started, place = self._tiers.clock.monotonic(), self.place(part, drained=True)
        try:
            with place.open() as views:
                concurrency = self._tiers.config.read_concurrency()
                chunks.fetch(store, entry, views[entry.basename], concurrency=concurrency)
            fetched = place.keep()
        except BaseException:
            place.drop()
            raise
        fetched.tier, fetched.bytes_read = "durable", entry.size
        self._tiers.log.info("fetched %s: %s", name, rate(entry.size, self._tiers.clock.monotonic() - started))
        return fetched

    def place(self, part: Part, *, drained: bool) -> SlotOrFile:
        """Where to put a part's file that comes to this node."""
        return SlotOrFile(self._tiers, part, drained=drained)

    def find(self, save_id: str) -> StoredPart:
        """The part of a save in this node's memory, or the copy of it that this node keeps.

        Raises:
            CheckpointNotFoundError: It is not there, or no longer.
        """
        return find_part(self._tier, save_id, self._rank)

    def hold(self, fetched: FetchedPart, search: Search, started: float, *, keep: bool) -> Restored:
        """Holds a file that is on this node, so that nothing takes it away before it is loaded.

        Args:
            fetched: The file.
            search: Which led to it.
            started: When that began.
            keep: Whether mappings of it may outlive the holding.

        Raises:
            CheckpointNotFoundError: It is not there any more.
        """
        part = fetched.part
        restored = Restored(
            name=part.name,
            content=part.content if part.save_id else None,
            rejected=search.rejected,
            newest_save_id=max(filter(None, (search.newest, part.save_id)), default=None),
            tier=fetched.tier,
            path=Path(fetched.path),
            bytes_read=fetched.bytes_read,
            seconds=self._tiers.clock.monotonic() - started,
        )
        if fetched.temporary:
            restored._held.callback(_unlink, fetched.path)
        elif part.save_id:
            restored._held.enter_context(self._tier.reading(self.find(part.save_id), keep=keep))
        return restored

    def report(self, restored: Restored) -> None:
        """Logs what training resumes from."""
        if restored.content is not None:
            self._tiers.log.info(
                "Step %d: resuming from %s%s (%s, %s) after %.2f s",
                restored.step,
                "" if self._rank is None else f"shard {self._rank} of ",
                restored.name,
                restored.tier,
                gib(restored.path.stat().st_size),
                restored.seconds,
            )


class SlotOrFile:
    """Where a part's file is put: a slot, or a temporary file where memory has no room for it."""

    def __init__(self, tiers: Tiers, part: Part, *, drained: bool) -> None:
        self._tiers = tiers
        self._part = part
        (self._entry,) = part.content.files
        self._path: Path | None = None
        self._slot = SlotPlace(tiers.memory, part, drained=drained, acquire=self._acquire)

    def _acquire(self, size: int) -> Slot:
        if self._tiers.memory.is_taken(self._part.save_id, self._part.rank):
            # A newer release's, for one: not ours to remove.
            raise MemoryTierError("memory holds something of this save that can't be used", key=self._part.save_id)
        return self._tiers.memory.acquire(size)

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[str, memoryview]]:
        with contextlib.ExitStack() as held:
            views: Mapping[str, memoryview] = {}
            # What others wrote has no save id, by which memory keeps what it holds.
            if self._part.save_id:
                try:
                    views = held.enter_context(self._slot.open())
                except MemoryTierError as error:
                    self._tiers.log.warning("fetching into a temporary file: %s", error)
            if not views:
                self._path, view = held.enter_context(chunks.temporary_file(self._entry.size))
                views = {self._entry.basename: view}
            yield views

    def keep(self) -> FetchedPart:
        if self._path is not None:
            return FetchedPart(self._part, str(self._path), "peer", temporary=True)
        stored = self._slot.keep()
        return FetchedPart(stored.part, str(stored.file(self._entry.basename)), "peer")

    def drop(self) -> None:
        self._slot.drop()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _unlink(path: str) -> None:
    # The first rank of the node to come does it; by then all have opened the file.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
