"""Restoring a checkpoint's file of one part: fetched to the node, verified, and held until it is loaded.

All ranks load the same full checkpoint: the lowest rank of each node verifies or fetches its file, the others map the
same pages. Of a local checkpoint, each rank verifies or fetches the file of its shard. A node without a copy reads
another node's, and only if no node has one the durable tier's. A bad copy leads to the next source, then to the next
candidate; it is quarantined and reported, never loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.chunks import Copies, Copy, SlotDestination
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.views import bytes_of, privately_mapped
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Found, Tier
from tiered_checkpoint_io.engine.restore.peers import Peers
from tiered_checkpoint_io.engine.restore.search import Attempt, Ready, Search
from tiered_checkpoint_io.engine.restore.shared_reads import FetchedFile, folder_for_files
from tiered_checkpoint_io.engine.retention import Rules, acquire, retain
from tiered_checkpoint_io.engine.save.facts import ShardRole
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, MemoryTierError, RestoreError
from tiered_checkpoint_io.logs import of_step, rate, size_text
from tiered_checkpoint_io.memory.parts import StoredPart, opened
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part

if TYPE_CHECKING:
    import torch

    from tiered_checkpoint_io.engine.trust import Trust

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Restored(Found):
    """A checkpoint's verified file on this node, which stays there until it is loaded.

    Attributes:
        path: The local file.
        mapped: The file's bytes, if it is in node memory: tensors may be made of them, and writes to these never gets
            into the file. If this process has verified them there, each page is touched once.
    """

    path: Path
    mapped: torch.UntypedStorage | None = field(default=None, repr=False)

    def load(self, trust: Trust, *, map_location: Any, rank: int | None = None) -> Any:
        """Returns the file's state, by ``torch.load``; raises as :meth:`Trust.read`, with ``rank`` in the error."""
        step = ids.known(self.step)
        where = {"tier": self.tier, "key": self.name, "rank": rank, "step": step}
        # A file of another tool may be in torch's old format, which can't be mapped.
        ours = self.content is not None
        options = {"map_location": map_location, "mmap": ours, "mapped": self.mapped}
        return trust.read(self.path, self.name, where, verified=ours, **options)


@dataclass(slots=True)
class FetchedPart:
    """A part's file on this node, verified: in its memory, or else in a file of a store, or in a temporary one."""

    part: Part
    path: Path
    tier: Tier
    in_memory: bool = True

    @classmethod
    def stored(cls, stored: StoredPart, tier: Tier) -> FetchedPart:
        """Returns a part of one file in this node's memory."""
        (entry,) = stored.part.content.files
        return cls(stored.part, stored.file(entry.basename), tier)

    def brief(self) -> FetchedPart:
        """Returns the same without the hashes, of which a large file has many."""
        return replace(self, part=replace(self.part, content=self.part.content.without_hashes()))


class NodeFetcher:
    """Verifies and fetches for one node."""

    def __init__(self, search: Search, role: ShardRole | None = None) -> None:
        """Takes the search, and this rank's shard if each rank has one file; None for one file in all."""
        self._search = search
        self._role = role
        self._rank = role.shard if role is not None else None
        #: File that was verified last in node memory, as it is mapped, and its identity; open until it is held.
        self._mapped: tuple[torch.UntypedStorage, os.stat_result] | None = None
        self._open = contextlib.ExitStack()
        #: Temporary file, until all ranks of the node have read it.
        self._temporary = contextlib.ExitStack()
        self._is_durable = False

    @property
    def tiers(self) -> Tiers:
        """This node's tiers."""
        return self._search.tiers

    def fetch_everywhere(self, candidate: Candidate) -> FetchedPart | None:
        """Returns this rank's file, if all nodes have theirs intact, or all ranks their shards' files; else None."""
        search, rank = self._search, self._search.group.rank
        # If only replicas are left, one node takes over the lost node's work.
        takes_over = (rank == 0 or self._role is not None) and candidate.is_orphaned(self._rank or 0)
        mine, self._is_durable = Attempt[FetchedPart](), candidate.durable is not None

        def fetch() -> Attempt[FetchedPart]:
            nonlocal mine
            self._check_degree(candidate)
            if self._leads:
                mine = self._fetch(candidate, takes_over=takes_over)
            return Attempt(mine.value and mine.value.brief(), mine.rejected)

        #: The rank that fetches for each rank.
        fetching = [rank if self._role else search.leader_of(node) for rank, node in enumerate(search.nodes)]
        everywhere = False
        try:
            found = search.share(fetch)
            everywhere = all(found[rank] is not None for rank in fetching)
        finally:
            if not everywhere:
                self._temporary.close()
        return found[fetching[rank]] if everywhere else None

    def read_everywhere(self, found: FetchedPart, read: Callable[[Restored], _T]) -> tuple[Restored, _T]:
        """Reads a file on all ranks; all fail if one does. No rank lets it go before all have opened it."""

        def opened_and_read() -> tuple[Restored, _T]:
            restored = held.enter_context(self.hold(found))
            if self._search.group.rank == 0 or self._role is not None:
                self._report(restored)
            return restored, read(restored)

        with contextlib.ExitStack() as held:
            used = self._search.group.together(opened_and_read)
        if self._leads:
            self._retain(found)
        return used

    @property
    def _leads(self) -> bool:
        return self._role is not None or self._search.leads

    def _check_degree(self, candidate: Candidate) -> None:
        shards, role = candidate.content.world_size, self._role
        if role is not None and shards != role.degree:
            raise RestoreError(
                f"{candidate.name} is a local checkpoint of {shards} shards, and {role.degree} are to load it",
                operation="load",
                key=ids.join_url(self.tiers.dirpath, candidate.name),
                rank=role.shard,
                step=candidate.content.step,
                hint="the shard degree has to stay as it was; the number of replicas may change. To go on with"
                " another one, save by kind='sharded'",
            )

    def _fetch(self, candidate: Candidate, *, takes_over: bool) -> Attempt[FetchedPart]:
        """Returns the file from this node's memory, from that of peers, or from the durable tier.

        ``takes_over`` is true if only replicas are left, and this node is to own the part from now on.
        """
        mine, notes = Attempt[FetchedPart](), list[str]()
        with contextlib.closing(self._search.peers(candidate)) as peers:
            for tier in candidate.sources(self._search.node, self._rank or 0):
                read = partial(self._read, candidate, tier, peers, takes_over=takes_over)
                mine = self._search.attempt(candidate, tier, read)
                notes += mine.rejected
                if mine.value is not None:
                    break
            from_peers = [f"rank {self._search.group.rank}: {note}" for note in peers.rejected]
        return Attempt(mine.value, from_peers + notes)

    def _read(self, candidate: Candidate, tier: Tier, peers: Peers, *, takes_over: bool) -> FetchedPart:
        # Files of several ranks do not wait for each other.
        with self.tiers.lock("" if self._rank is None else f"-{self._rank}"):
            if tier == "memory":
                fetched = self._from_memory(candidate.save_id)
                return self._adopt(candidate.save_id) if takes_over else fetched
            # Another process of this node may have fetched it while we waited for the lock.
            with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
                return self._from_memory(candidate.save_id)
            if tier == "peer":
                return self._fetched(*peers.copies_of_part(self._rank or 0), tier, drained=not takes_over)
            part = self._durable_part(candidate)
            (entry,) = part.content.files
            if candidate.is_foreign and ids.url_scheme(self.tiers.dirpath) is None:
                # A local file needs no copy: no mapping of it stays.
                return FetchedPart(part, Path(self.tiers.dirpath, entry.path), tier, in_memory=False)
            return self._fetched(part, [Copies(entry, [Copy(self.tiers.store, entry.path)])], tier, drained=True)

    def _from_memory(self, save_id: str) -> FetchedPart:
        stored = self.find(save_id)
        (entry,) = stored.part.content.files
        try:
            with contextlib.ExitStack() as open_until:
                descriptor = open_until.enter_context(opened(stored))[entry.basename]
                storage = privately_mapped(descriptor, entry.size)
                chunks.verify(entry, bytes_of(storage), where=str(stored.file(entry.basename)))
                self._mapped = storage, os.fstat(descriptor)
                # A load of another process may remove a part that no process has open.
                self._open.close()
                self._open = open_until.pop_all()
        except CorruptCheckpointError as error:
            self.tiers.quarantine(stored, error)
            raise
        return FetchedPart.stored(stored, "memory")

    def _adopt(self, save_id: str) -> FetchedPart:
        """Returns the file in this node's memory, which is its own from now on and not a replica."""
        stored = self.find(save_id)
        if stored.is_replica:
            stored = self.tiers.memory.adopt(stored, drained=False)
        return FetchedPart.stored(stored, "memory")

    def _durable_part(self, candidate: Candidate) -> Part:
        """Returns the part of one file on the durable tier."""
        assert candidate.durable is not None
        # For a checkpoint of several parts, the index and the description of one part are read.
        files = files_of(self.tiers.store(), candidate.durable).of_rank(self._rank or 0)
        if len(files) != 1:
            whose = "" if self._rank is None else f" of shard {self._rank}"
            text = f"its manifest names {len(files)} files{whose}, not one"
            raise CorruptCheckpointError(text, operation="restore", key=candidate.save_id)
        content = replace(candidate.durable, files=files, index=None)
        return Part.found(candidate.name, self._rank or 0, content, self.tiers.place)

    def _fetched(self, part: Part, copies: Sequence[Copies], tier: Tier, *, drained: bool) -> FetchedPart:
        """Fetches a file to this node's memory or spill; if neither has room, to a temporary file."""
        tiers, started = self.tiers, self.tiers.clock.monotonic()
        concurrency = tiers.config.read_concurrency() if tier == "durable" else chunks.RANGES

        def slot(size: int) -> Slot:
            # Memory keeps parts by their save ids. A part of another format version, for one, is not ours to remove.
            if not part.save_id or tiers.memory.is_taken(part.save_id, part.rank):
                raise MemoryTierError("memory holds something of this save that can't be used", key=part.save_id)
            return acquire(tiers.memory, size, Rules.of_load(part))

        try:
            destination = SlotDestination(tiers.memory, part, drained=drained, acquire=slot)
            fetched = FetchedPart.stored(chunks.read_part(copies, destination, concurrency=concurrency), tier)
        except MemoryTierError as error:
            if part.save_id:
                tiers.log.warning("fetching into a temporary file: %s", error)
            folder = folder_for_files(tiers.memory, part.content.size)
            file = FetchedFile(copies[0], folder, is_private=True, concurrency=concurrency, clock=tiers.clock)
            self._temporary.callback(file.close)
            fetched = FetchedPart(part, file.whole(), tier, in_memory=False)
        where = " from other nodes" if tier == "peer" else ""
        amount = rate(part.content.size, tiers.clock.monotonic() - started)
        tiers.log.info("fetched %s%s: %s", part.name, where, amount)
        return fetched

    def find(self, save_id: str) -> StoredPart:
        """Returns the part of a save in this node's memory, or the replica of it that this node keeps."""
        return self.tiers.memory.find(save_id, self._rank)

    @contextlib.contextmanager
    def hold(self, fetched: FetchedPart) -> Iterator[Restored]:
        """Holds a file that is on this node until it is loaded; mappings of it live on, unchanged."""
        part, search = fetched.part, self._search
        restored = Restored(
            name=part.name,
            content=part.content if part.save_id else None,
            rejected=search.rejected,
            newest_save_id=max(filter(None, (search.newest, part.save_id)), default=None),
            dirpath=self.tiers.dirpath,
            tier=fetched.tier,
            is_durable=self._is_durable,
            path=fetched.path,
            seconds=self.tiers.clock.monotonic() - search.began,
        )
        with self._temporary, contextlib.ExitStack() as held:
            if fetched.in_memory:
                with self._open:
                    descriptors = held.enter_context(opened(self.find(part.save_id), keep=self._rank is None))
                    descriptor, (mapped, self._mapped) = descriptors[fetched.path.name], (self._mapped, None)
                    if mapped is not None and os.path.samestat(mapped[1], os.fstat(descriptor)):
                        restored.mapped = mapped[0]
                    else:
                        restored.mapped = privately_mapped(descriptor, part.content.size)
            try:
                yield restored
            finally:
                restored.mapped = None

    def _retain(self, fetched: FetchedPart) -> None:
        """Removes checkpoints that earlier loads have copied to this node, beyond its limit; never raises."""
        try:
            if fetched.part.save_id:
                memory, keep = self.tiers.memory, self.tiers.config.memory_keep_last
                retain(memory, memory.parts(), Rules.of_load(fetched.part, keep))
        except Exception as error:
            # The load does not fail because of this.
            self.tiers.log.warning("earlier checkpoints that were loaded stay in memory: %s", error)

    def _report(self, restored: Restored) -> None:
        """Logs the checkpoint from which training resumes."""
        if restored.content is not None:
            is_spilled = restored.tier == "memory" and self.tiers.memory.is_spilled(restored.path)
            self.tiers.log.info(
                "%sloading %s%s (%s, %s) after %.2f s",
                of_step(restored.step),
                "" if self._rank is None else f"shard {self._rank} of ",
                restored.name,
                "spill" if is_spilled else restored.tier,
                size_text(restored.path.stat().st_size),
                restored.seconds,
            )
            self.tiers.say_whose(restored.content)


def note_restore(session: Session, found: Found, began: float) -> None:
    """Adds a load that has ended to the node's record of the run; ``began`` is by the monotonic clock."""
    session.note(
        "restore",
        name=found.name,
        step=found.step,
        tier=found.tier,
        seconds=round(session.clock.monotonic() - began, 3),
        created=found.content.created if found.content is not None else 0.0,
    )


def restore(
    ready: Ready, group: Group, read: Callable[[Restored], _T], rejected: Mapping[str, str] | None = None
) -> tuple[Restored, _T] | None:
    """Fetches a full checkpoint to every node, and reads it on every rank.

    Every rank of ``group`` calls this, and all return the same checkpoint or raise the same error.

    ``rejected`` has the ids of saves that this rank can't take, and the reasons. Returns the checkpoint, which is held
    until ``read`` returns, and the result of ``read``; None if no tier holds one, and all tiers have answered.

    Raises:
        CheckpointNotFoundError: There is none of the wanted name.
        RestoreError: There are some, but none is intact.
        TieredCheckpointError: As :meth:`Search.run`; or ``read`` has failed on some rank.
    """
    search = Search("full", group)
    fetcher = NodeFetcher(search)
    found = search.run(ready, fetcher.fetch_everywhere, rejected)
    if found is not None:
        return fetcher.read_everywhere(found, read)
    if search.selector.kind == "name" or not isinstance(search.nothing, CheckpointNotFoundError):
        raise search.nothing
    return None


def restore_local(ready: Ready, group: Group, role: ShardRole, read: Callable[[Restored], None]) -> Restored:
    """Fetches the file of each rank's shard of a local checkpoint, and reads it; else as :func:`restore`.

    Raises:
        CheckpointNotFoundError: There is none.
        RestoreError: None is intact, another number of shards made it, or the ranks want different checkpoints.
        TieredCheckpointError: As :func:`restore`.
    """
    search = Search("local", group)
    fetcher = NodeFetcher(search, role)
    found = search.run(ready, fetcher.fetch_everywhere)
    if found is None:
        raise search.nothing
    return fetcher.read_everywhere(found, read)[0]
