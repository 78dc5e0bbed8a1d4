"""Opening a sharded checkpoint: all ranks agree on one, and hold their nodes' parts of it.

Rank 0 chooses it for all: see ``search``. One rank reads ``.metadata``, which grows with tensors and
ranks, and shares its bytes with all others. The tensors' bytes are read later, by each rank for itself.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.chunks import Span
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Selector, Tier
from tiered_checkpoint_io.engine.restore.elsewhere import at_its_place
from tiered_checkpoint_io.engine.restore.ending import Found
from tiered_checkpoint_io.engine.restore.peers import restore_owners
from tiered_checkpoint_io.engine.restore.search import Attempt, Search
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.logs import of_step
from tiered_checkpoint_io.model.manifest import METADATA


@dataclass(slots=True, kw_only=True)
class OpenShards(Found):
    """A sharded checkpoint that all ranks have agreed on; held on this node until it is closed.

    Attributes:
        small: ``.metadata`` until it is parsed, and the other small files, by name; verified if they have hashes.
        files: The shards' bytes; None if they are not read piece by piece.
        scattered: True if its bytes are in the memory of several nodes.
        shared: True if it is read from the durable tier, by several ranks of a node.
        is_durable: True if it is known to be on the durable tier; its bytes may come from memory.
    """

    small: dict[str, bytes | memoryview] = field(default_factory=dict)
    files: ShardFiles | None = None
    scattered: bool = False
    shared: bool = False
    is_durable: bool = False

    @property
    def metadata(self) -> bytes | memoryview:
        """The content of ``.metadata``."""
        return self.small[METADATA]

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Expects the files that ``.metadata`` names, if another tool wrote them, so that no manifest does.

        Args:
            sizes: Bytes of each file that it names, by basename.
        """
        if self.content is None and self.files is not None:
            for basename, size in sizes.items():
                self.files.expect(chunks.unverified(f"{self.name}/{basename}", size))

    def close(self) -> None:
        """Lets the files go."""
        if self.files is not None:
            self.files.close()


def open_shards(
    tiers: Tiers, selector: Selector, group: Group, rejected: Mapping[str, str] | None = None
) -> OpenShards:
    """Chooses a sharded checkpoint; every rank of ``group`` calls this, and all get the same, or the same error.

    Args:
        tiers: Tiers to look at.
        selector: Request for a checkpoint.
        group: The ranks that load together.
        rejected: Ids of saves that this rank can't take, and why.

    Raises:
        CheckpointNotFoundError: There is none.
        RestoreError: There are some, but none is intact.
        TieredCheckpointError: As :meth:`Search.run`.
    """
    return at_its_place(tiers, selector, lambda tiers, selector: _open(tiers, selector, group, rejected))


def _open(tiers: Tiers, selector: Selector, group: Group, rejected: Mapping[str, str] | None) -> OpenShards:
    search = Search(tiers, selector, "sharded", group)
    search.look(rejected)
    opened = search.run(lambda candidate: _try(tiers, candidate, search))
    if opened is None:
        raise search.nothing
    if group.rank == 0:
        tiers.log.info("%sloading %s", of_step(opened.step), opened.name)
        if opened.content is not None:
            tiers.say_whose(opened.content)
    return opened


def share_reads(group: Group, files: ShardFiles, spans: Mapping[str, list[Span]]) -> None:
    """Agrees with the ranks of each node on the chunks of the durable tier that several of them read.

    Every rank calls this, in :meth:`Group.failing_together`.

    Raises:
        TieredCheckpointError: Some rank failed.
    """
    mine = {name: chunks.merged(wanted) for name, wanted in spans.items()}
    gathered: list[tuple[str, dict[str, list[Span]]]] = group.all_gather((group.node, mine))
    others: defaultdict[str, list[Span]] = defaultdict(list)
    for rank, (node, theirs) in enumerate(gathered):
        if node == group.node and rank != group.rank:
            # A rank need not know the chunks of files that it does not read itself.
            for basename in theirs.keys() & mine.keys():
                others[basename] += theirs[basename]
    files.share({basename: set(indices) for basename, indices in files.chunks_of(others).items()})


def _try(tiers: Tiers, candidate: Candidate, search: Search) -> OpenShards | None:
    """Opens a candidate on all ranks; None if no rank has its small files intact."""
    scattered = candidate.in_memory and len(set(search.nodes)) > 1
    peers = search.peers(candidate) if scattered else None
    if candidate.in_memory:
        restore_owners(tiers, candidate, search.nodes, search.group.rank, peers)
        # One rank of each node has restored the files; now all its ranks see them.
        search.group.all_gather(None)
    readers_here = search.nodes.count(search.group.node)
    files = search.together(lambda: ShardFiles(tiers, candidate, readers=readers_here, peers=peers), ShardFiles.close)
    leaders = sorted(search.leader_of(node) for node in candidate.coordinators)
    readers: list[tuple[int, Tier]] = [(rank, "memory") for rank in leaders]
    readers += [(0, "durable")] if candidate.durable is not None else []
    try:
        for rank, tier in readers:
            mine = Attempt[dict[str, bytes]]()
            if search.group.rank == rank:
                mine = search.attempt(candidate, tier, functools.partial(_small, files, tier))
            names = search.share(mine, list)[rank]
            if names is not None:
                held = mine.value or {}
                small = {name: search.group.share_bytes(held.get(name, b""), rank) for name in names}
                return OpenShards(
                    name=candidate.name,
                    dirpath=tiers.dirpath,
                    content=None if candidate.is_foreign else candidate.content,
                    rejected=search.rejected,
                    newest_save_id=search.newest,
                    small=small,
                    files=files,
                    scattered=scattered,
                    shared=not candidate.in_memory and len(set(search.nodes)) < len(search.nodes),
                    is_durable=candidate.durable is not None,
                )
    except BaseException:
        files.close()
        raise
    files.close()
    return None


def _small(files: ShardFiles, tier: Tier) -> dict[str, bytes]:
    """Returns the small files that every rank needs; verified."""
    if tier == "memory":
        held = {name: entry.size for name, entry in files.held.items() if _is_small(name)}
        found = {name: files.verified(name, [(0, size)])[:size] for name, size in held.items()}
    else:
        sizes = files.durable.sizes if files.durable is not None else {}
        names = {path.rpartition("/")[2]: size for path, size in sizes.items()}
        found = {name: files.ensure(name, [(0, size)])[:size] for name, size in names.items() if _is_small(name)}
    if METADATA not in found:
        raise CorruptCheckpointError(f"there is no {METADATA}", operation="restore", tier=tier)
    return {name: bytes(data) for name, data in found.items()}


def _is_small(basename: str) -> bool:
    return not basename.endswith(".distcp")
