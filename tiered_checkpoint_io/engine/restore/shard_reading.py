"""Opening a sharded checkpoint: all ranks agree on one, and hold what their nodes have of it.

Which one it is, rank 0 chooses for all: see ``search``. What ``.metadata`` says reaches all ranks by an exchange, so
that it is read once. The tensors' bytes are read later, by each rank for itself.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.durable.files import Files, files_of
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Selector
from tiered_checkpoint_io.engine.restore.part_moves import restore_owners
from tiered_checkpoint_io.engine.restore.search import Found, Search
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.engine.restore.shared_reads import clear_reads
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA


@dataclass(slots=True, kw_only=True)
class OpenShards(Found):
    """A sharded checkpoint that all ranks have agreed on; held on this node until it is closed.

    Attributes:
        small: ``.metadata``, and the other files beside the shards, by name; verified where they can be.
        files: The bytes that it names; None where they are not read piece by piece.
        scattered: Whether its bytes lie in the memory of several nodes.
    """

    small: dict[str, bytes] = field(default_factory=dict)
    files: ShardFiles | None = None
    scattered: bool = False

    @property
    def metadata(self) -> bytes:
        """The content of ``.metadata``."""
        return self.small[METADATA]

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Reckons with the files that ``.metadata`` names, where others wrote them, so that no manifest does.

        Args:
            sizes: How many bytes of each file it names, by basename.
        """
        if self.content is None and self.files is not None:
            for basename, size in sizes.items():
                self.files.adopt(chunks.unverified(f"{self.name}/{basename}", size))

    def close(self) -> None:
        """Lets the files go."""
        if self.files is not None:
            self.files.close()


class ShardRestorer:
    """Opens sharded checkpoints of one durable tier, and of the memory of the nodes."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def open(self, selector: Selector, group: Group, rejected: Collection[str] = ()) -> OpenShards:
        """Chooses a checkpoint; every rank of ``group`` calls this, and all get the same, or the same error.

        Args:
            selector: What is wanted.
            group: The ranks that load together.
            rejected: Saves that this rank has found damaged.

        Raises:
            CheckpointNotFoundError: There is none.
            RestoreError: There are some, but none is intact.
            OtherKindError: What is meant is no sharded checkpoint.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            FormatVersionError: A newer release wrote what would have to be chosen.
        """
        search = Search(self._tiers, selector, "sharded", group)
        search.look(rejected)
        opened = search.run(lambda candidate: self._try(candidate, search))
        if opened is None:
            raise search.nothing
        if group.rank == 0:
            self._tiers.log.info("Step %d: resuming from %s", opened.step, opened.name)
        return opened

    # ------------------------------------------------------------------------------- one candidate
    def _try(self, candidate: Candidate, search: Search) -> OpenShards | None:
        content, nodes = candidate.content, search.nodes
        small: dict[str, bytes] | None = None
        # Read where it is needed, once: a rank that finds its bytes in memory asks the durable tier for nothing.
        there = functools.cache(lambda: files_of(self._tiers.store(), content)) if candidate.durable else None
        for rank in sorted(search.leader_of(node) for node in candidate.coordinators):
            small = self._share(rank, lambda: self._small_here(candidate), candidate, "memory", search)
            if small is not None:
                break
        if small is None and there is not None:
            small = self._share(0, lambda: self._small_there(candidate, there()), candidate, "durable", search)
        if small is None:
            return None
        if candidate.in_memory:
            restore_owners(search.group, self._tiers, candidate, nodes)
        found = small
        return OpenShards(
            name=candidate.name,
            content=None if candidate.is_foreign else content,
            rejected=search.rejected,
            newest_save_id=search.newest,
            small=small,
            files=search.together(lambda: self._open_files(candidate, found, there, search), ShardFiles.close),
            scattered=candidate.in_memory and len(set(nodes)) > 1,
        )

    def _share(
        self, rank: int, read: Callable[[], dict[str, bytes]], candidate: Candidate, tier: str, search: Search
    ) -> dict[str, bytes] | None:
        """What one rank reads, on all of them; None where it is damaged."""
        outcome = search.share(search.attempt(candidate, tier, read) if search.group.rank == rank else None)[rank]
        assert outcome is not None
        return outcome.value

    def _small_here(self, candidate: Candidate) -> dict[str, bytes]:
        """The files beside the shards, from this node's memory."""
        problem: Exception = CheckpointNotFoundError("no longer in memory", operation="restore", key=candidate.save_id)
        for stored in self._tiers.held():
            if stored.save_id == candidate.save_id and stored.part.commits:
                try:
                    with self._tiers.verified(stored, _is_small) as views:
                        return {name: bytes(view) for name, view in views.items() if _is_small(name)}
                except CorruptCheckpointError as error:
                    problem = error
        raise problem

    def _small_there(self, candidate: Candidate, files: Files) -> dict[str, bytes]:
        """The files beside the shards, from the durable tier."""
        found = {}
        basenames = (path.rpartition("/")[2] for path in files.sizes)
        for entry in filter(None, map(files.entry, filter(_is_small, basenames))):
            data = bytearray(entry.size)
            with memoryview(data) as view:
                chunks.fetch(self._tiers.store(), entry, view, concurrency=self._tiers.config.read_concurrency())
            found[entry.basename] = bytes(data)
        if METADATA not in found:
            raise CorruptCheckpointError("its manifest names no .metadata", operation="restore", key=candidate.name)
        return found

    def _open_files(
        self, candidate: Candidate, small: dict[str, bytes], durable: Callable[[], Files] | None, search: Search
    ) -> ShardFiles:
        if search.leads:
            clear_reads(self._tiers.memory.root)
        url = ids.join_url(self._tiers.dirpath, candidate.name)
        key = candidate.save_id or hashlib.sha256(url.encode() + small[METADATA]).hexdigest()[:32]
        files = ShardFiles(self._tiers, key, durable=durable, readers=search.nodes.count(search.group.node))
        for stored in self._tiers.held():
            if stored.save_id == candidate.save_id:
                files.hold(stored)
        return files


def _is_small(basename: str) -> bool:
    """Whether a file lies beside the shards: few bytes, which every rank needs."""
    return not basename.endswith(".distcp")
