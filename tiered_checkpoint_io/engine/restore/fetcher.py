"""One node's part of a restore: a checkpoint's file, fetched into its memory and verified."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, portable
from tiered_checkpoint_io.engine.ranks.transfer import GroupChannel, SlotPlace, find_part, receive_part, text_of
from tiered_checkpoint_io.engine.restore.catalog import NodeCatalog, Tiers, look
from tiered_checkpoint_io.engine.restore.choice import Candidate, Tier
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    LostRankError,
    MemoryTierError,
    RestoreError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part
from tiered_checkpoint_io.stores.base import Store


@dataclass(slots=True)
class FetchResult:
    """How one node fared with a candidate.

    Attributes:
        path: The local file, verified; None where no source gave one.
        tier: Where it came from.
        bytes_read: Bytes read from the durable tier.
        temporary: Whether the file is to be unlinked once it is open.
        rejected: Copies that were not taken, and why.
        error: What ended the attempts, other than a bad copy.
    """

    path: str | None = None
    tier: Tier = "memory"
    bytes_read: int = 0
    temporary: bool = False
    rejected: list[str] = field(default_factory=list)
    error: TieredCheckpointError | None = None


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
        self._clock = tiers.clock
        self._part_rank = part_rank

    def fetch(self, candidate: Candidate, sources: tuple[Tier, ...], rank: int) -> FetchResult:
        """Tries one source after the other, until one gives an intact copy. Never raises."""
        result = FetchResult()
        for tier in sources:
            if tier == "peer":
                # All ranks do that together; see restore.py.
                continue
            try:
                with self._lock(self._part_rank):
                    (self._from_memory if tier == "memory" else self._from_durable)(candidate, result)
                result.tier = tier
                break
            except (CorruptCheckpointError, CheckpointNotFoundError, StoreNotFoundError) as error:
                step = candidate.content.step
                note = f"rank {rank}: {tier} {candidate.name} (step {step}): {error}"
                result.rejected.append(note)
                self._tiers.skipped(note)
            except Exception as error:
                # The others wait for the outcome, whatever it is.
                result.error = portable(error, rank)
                break
        return result

    def _from_memory(self, candidate: Candidate, result: FetchResult) -> None:
        stored = self.find(candidate.content.save_id)
        (entry,) = stored.part.content.files
        try:
            with self._tier.reading(stored) as views:
                chunks.verify(entry, views[entry.basename], where=str(stored.file(entry.basename)))
        except CorruptCheckpointError as error:
            self._tier.quarantine(stored.folder, str(error))
            raise
        result.path = str(stored.file(entry.basename))

    def _from_durable(self, candidate: Candidate, result: FetchResult) -> None:
        # Another process of this node may have fetched it while we waited for the lock.
        with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
            self._from_memory(candidate, result)
            return
        assert candidate.durable is not None
        store = self._tiers.store()
        entry = self._entry(store, candidate.durable)
        concurrency = self._tiers.config.read_concurrency()
        started = self._clock.monotonic()
        try:
            slot = self.room(candidate.content.save_id, entry.size)
        except MemoryTierError as error:
            self._tiers.log.warning("fetching into a temporary file: %s", error)
            with chunks.temporary_file(entry.size) as (path, view):
                chunks.fetch(store, entry, view, concurrency=concurrency)
            result.path, result.temporary = str(path), True
        else:
            try:
                with slot.view as whole, whole[: entry.size] as view:
                    chunks.fetch(store, entry, view, concurrency=concurrency)
            except BaseException:
                self._tier.give_back(slot)
                raise
            content = replace(candidate.durable, files=(entry,), index=None)
            part = Part(candidate.name, self._part_rank or 0, content, self._tiers.dirpath, durable=True)
            stored = self._tier.commit(part, {entry.basename: slot}, drained=True, saved=False)
            result.path = str(stored.file(entry.basename))
        result.bytes_read = entry.size
        self._tiers.log.info("fetched %s: %s", candidate.name, rate(entry.size, self._clock.monotonic() - started))

    def _entry(self, store: Store, content: Content) -> FileEntry:
        """The file to fetch; of a checkpoint of several parts, the index and the description of one part tell it."""
        files = files_of(store, content).of_rank(self._part_rank or 0)
        if len(files) != 1:
            whose = "" if self._part_rank is None else f" of shard {self._part_rank}"
            raise CorruptCheckpointError(
                f"its manifest names {len(files)} files{whose}, not one", operation="restore", key=content.save_id
            )
        return files[0]

    def room(self, save_id: str, size: int) -> Slot:
        """A slot for the file of a save.

        Raises:
            MemoryTierError: No room for it, or its place is taken by something that can't be used.
        """
        if self._tier.is_taken(save_id, self._part_rank or 0):
            # A newer release's, for one: not ours to remove.
            raise MemoryTierError(
                "memory holds something of this save that can't be used",
                operation="restore",
                tier="memory",
                key=save_id,
            )
        return self._tier.acquire(size)

    def find(self, save_id: str) -> StoredPart:
        """The part of a save in this node's memory, or the copy of it that this node keeps.

        Raises:
            CheckpointNotFoundError: It is not there, or no longer.
        """
        return find_part(self._tier, save_id, self._part_rank)

    def from_peer(self, part: Part, group: Group, source: int, *, drained: bool) -> FetchResult:
        """Receives a checkpoint of one file from another rank, which is sending it. Raises only if that is lost.

        Args:
            part: Its description, with the hashes.
            group: The ranks that restore together.
            source: Which rank sends.
            drained: Whether this node has nothing to do for it to get to the durable tier.

        Raises:
            LostRankError: The source is gone.
        """
        started = self._clock.monotonic()
        place = _SlotOrFile(self, part, drained=drained)
        try:
            path = receive_part(GroupChannel(group, source), part, place)
        except LostRankError:
            raise
        except Exception as error:
            step = part.content.step
            note = f"rank {group.rank}: peer (rank {source}) {part.name} (step {step}): {text_of(error)}"
            self._tiers.skipped(note)
            return FetchResult(tier="peer", rejected=[note])
        self._tiers.log.info(
            "received %s from rank %d: %s",
            part.name,
            source,
            rate(part.content.size, self._clock.monotonic() - started),
        )
        return FetchResult(path, "peer", temporary=place.is_temporary)

    def look(self, rank: int) -> NodeCatalog:
        """Lists this node's memory, and takes out of it what can't be read.

        Args:
            rank: This rank, for what is told of the damaged.
        """
        here = look(self._tiers)
        if here.damaged:
            # Under the lock, so that no other process moves the same folder; listed again there.
            with self._lock():
                for folder, error in (*self._tier.damaged(), *self._tier.replicas.damaged()):
                    # What a newer release wrote is not damaged.
                    if not isinstance(error, FormatVersionError):
                        self._tier.quarantine(folder, str(error))
            here.damaged = [f"rank {rank}: {note}" for note in here.damaged]
            for note in here.damaged:
                self._tiers.skipped(note)
        return here

    @contextlib.contextmanager
    def _lock(self, part_rank: int | None = None) -> Iterator[None]:
        """One process of a node at a time verifies or fetches, also where no group orders them.

        Args:
            part_rank: Files of several ranks do not wait for each other.

        Raises:
            RestoreError: Another process did not finish within ``wait_timeout_s``.
        """
        which = "" if part_rank is None else f"-{part_rank}"
        path = self._tier.root / f"restore{which}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline = self._clock.monotonic() + self._tiers.config.wait_timeout_s
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if self._clock.monotonic() > deadline:
                        raise RestoreError(
                            "another process of this node did not finish restoring in time",
                            operation="restore",
                            key=str(path),
                        ) from None
                    self._clock.sleep(self._clock.timing.node_lock_poll_s)
            yield
        finally:
            os.close(descriptor)

    def fetch_foreign(self, name: str, size: int, rank: int) -> FetchResult:
        """Fetches a file of which no hashes are known. Never raises."""
        result = FetchResult(tier="durable")
        try:
            if ids.url_scheme(self._tiers.dirpath) is None:
                # A local file needs no copy: nothing of it is kept mapped.
                path = Path(self._tiers.dirpath, name)
                os.stat(path)
            else:
                with chunks.temporary_file(size) as (path, view):
                    concurrency = self._tiers.config.read_concurrency()
                    chunks.fetch(self._tiers.store(), chunks.unverified(name, size), view, concurrency=concurrency)
                result.temporary, result.bytes_read = True, size
            result.path = str(path)
        except Exception as error:
            result.error = portable(error, rank)
        return result


class _SlotOrFile:
    """Where a checkpoint of one file is put: a slot, or a temporary file where memory has no room for it."""

    def __init__(self, fetcher: NodeFetcher, part: Part, *, drained: bool) -> None:
        self._log = fetcher._tiers.log
        (self._entry,) = part.content.files
        self._path: Path | None = None
        self._slot = SlotPlace(
            fetcher._tier, part, drained=drained, acquire=lambda size: fetcher.room(part.save_id, size)
        )

    @property
    def is_temporary(self) -> bool:
        return self._path is not None

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[str, memoryview]]:
        with contextlib.ExitStack() as held:
            try:
                views = held.enter_context(self._slot.open())
            except MemoryTierError as error:
                self._log.warning("receiving into a temporary file: %s", error)
                self._path, view = held.enter_context(chunks.temporary_file(self._entry.size))
                views = {self._entry.basename: view}
            yield views

    def keep(self) -> str:
        return str(self._path or self._slot.keep().file(self._entry.basename))

    def drop(self) -> None:
        self._slot.drop()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
