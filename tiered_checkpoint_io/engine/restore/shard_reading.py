"""Opening a sharded checkpoint: all ranks agree on one, and hold their nodes' parts of it.

Rank 0 chooses it for all: see ``search``. It also reads ``.metadata``, which grows with tensors and ranks, and sends it
with the choice. The tensors' bytes are read later, by each rank for itself.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.chunks import Span
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.choice import Candidate, Tier
from tiered_checkpoint_io.engine.restore.ending import Found
from tiered_checkpoint_io.engine.restore.peers import PartMove, moves_to_owners, restore_owners
from tiered_checkpoint_io.engine.restore.search import Attempt, Ready, Search
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
        sharing: Each rank's node, if it is read from the durable tier, by several ranks of a node.
        is_durable: True if it is known to be on the durable tier; its bytes may come from memory.
    """

    small: dict[str, bytes | memoryview] = field(default_factory=dict)
    files: ShardFiles | None = None
    scattered: bool = False
    sharing: list[str] = field(default_factory=list)
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
    ready: Ready, group: Group, take: Callable[[OpenShards], None], rejected: Mapping[str, str] | None = None
) -> OpenShards:
    """Chooses a sharded checkpoint; every rank of ``group`` calls this, and all get the same, or the same error.

    Args:
        ready: Opens this rank's tiers, and returns them and the request.
        group: The ranks that load together.
        take: Called with the open checkpoint; if this finds damage on some rank, all try the next one.
        rejected: Ids of saves that this rank can't take, and why.

    Raises:
        CheckpointNotFoundError: There is none.
        RestoreError: There are some, but none is intact.
        TieredCheckpointError: As :meth:`Search.run`.
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

    Args:
        spans: The ``(offset, length)`` spans that each rank reads, by file.
        nodes: Each rank's node.
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

    def _prepare(self, candidate: Candidate) -> Attempt[tuple[dict[str, bytes], list[PartMove]]]:
        """Reads the small files for all ranks, on rank 0: they grow with tensors and ranks. Also plans the moves."""

        def read() -> tuple[dict[str, bytes], list[PartMove]]:
            files = self._join(candidate)
            sizes = files.small(candidate.files)
            small = {name: bytes(files.ensure(name, [(0, size)])[:size]) for name, size in sizes.items()}
            if METADATA not in small:
                raise CorruptCheckpointError(f"there is no {METADATA}", operation="restore")
            return small, moves_to_owners(candidate, self.search.nodes) if candidate.in_memory else []

        self.close()
        return self.search.attempt(candidate, _source(candidate), read)

    def open(self, candidate: Candidate) -> OpenShards | None:
        """Opens a candidate; every rank calls this, and all get None if it is damaged on some rank."""
        search, nodes, (small, moves) = self.search, self.search.nodes, self.search.prepared
        if moves:
            mine = [move for move in moves if move.target == search.group.rank]
            with contextlib.closing(search.peers(candidate)) as peers:
                # One rank of each node restores the files; then all its ranks see them.
                search.group.together(lambda: restore_owners(search.tiers, candidate, mine, peers))
        opened = OpenShards(
            name=candidate.name,
            dirpath=search.tiers.dirpath,
            content=None if candidate.is_foreign else candidate.content,
            rejected=search.rejected,
            newest_save_id=search.newest,
            small=small,
            scattered=self._is_scattered(candidate),
            sharing=nodes if not candidate.in_memory and len(set(nodes)) < len(nodes) else [],
            is_durable=candidate.durable is not None,
        )

        def take() -> bool:
            opened.files = self._join(candidate)
            self._take(opened)
            return True

        taken = search.share(lambda: search.attempt(candidate, _source(candidate), take))
        if not all(taken):
            self.close()
            return None
        self._files = None
        return opened


def _source(candidate: Candidate) -> Tier:
    return "memory" if candidate.in_memory else "durable"
