"""Parts of one save in the memory of other nodes, read as a store: see ``stores/peer.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tiered_checkpoint_io.engine.chunks import RANGES, Copies, Copy, copies_at, describe
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError
from tiered_checkpoint_io.model.manifest import FileEntry, Part
from tiered_checkpoint_io.stores.peer import Endpoint, PeerStore

#: Nodes that read from one node at the same time, at most, while a checkpoint goes to all nodes.
CHILDREN = 2


class Peers:
    """The nodes that hold parts of a candidate, as one rank reads them."""

    def __init__(
        self,
        tiers: Tiers,
        candidate: Candidate,
        endpoints: Mapping[str, Endpoint],
        node: str,
        nodes: Sequence[str] = (),
    ) -> None:
        """Asks nothing yet.

        ``endpoints`` serve each node's memory, ``nodes`` has the node of each rank that reads, ``node`` is this one.
        """
        self._tiers, self._candidate = tiers, candidate
        self.rejected: list[str] = []
        connections = max(1, RANGES // max(1, nodes.count(node)))
        self._stores = {
            name: PeerStore(endpoint, connections=connections, clock=tiers.clock, waits=not candidate.held.get(name))
            for name, endpoint in endpoints.items()
            if name != node
        }
        #: Nodes begin with different sources.
        self._turn = sum(name < node for name in endpoints)
        self._first = self._stores.get(fan_out(candidate, nodes).get(node, ""))
        self._parts: dict[int, Part | None] = {}

    def holders(self, rank: int) -> list[PeerStore]:
        """Returns the nodes that hold a rank's part, in the order in which to read them."""
        able = [store for name, store in self._stores.items() if rank in self._candidate.held.get(name, ())]
        turn = self._turn % len(able) if able else 0
        able = able[turn:] + able[:turn]
        return able if self._first is None else [self._first, *(each for each in able if each is not self._first)]

    def part(self, rank: int) -> Part | None:
        """Returns the description of a rank's part; None if no other node has it."""
        if rank not in self._parts:
            self._parts[rank] = next(self._described(rank), None)
        return self._parts[rank]

    def _described(self, rank: int) -> Iterator[Part]:
        for store in self.holders(rank):
            try:
                yield describe(store, self._candidate.save_id, rank)
            except (StoreError, CorruptCheckpointError) as error:
                self._note(f"{self._candidate.name}: {error}")
                # It does not read the part itself.
                self._first = None if store is self._first else self._first

    def entry(self, basename: str) -> FileEntry | None:
        """Returns a file that some other node has."""
        rank = self._candidate.files.get(basename)
        part = self.part(rank) if rank is not None else None
        files = part.content.files if part is not None else ()
        return next((entry for entry in files if entry.basename == basename), None)

    def copies(self, entry: FileEntry, durable: Iterable[Copy]) -> Copies:
        """Returns the copies of a file that peers have, and after these the ``durable`` ones."""
        rank = self._candidate.files.get(entry.basename)
        part = self.part(rank) if rank is not None else None
        if part is None:
            return Copies(entry, durable)
        number = [each.basename for each in part.content.files].index(entry.basename)
        return copies_at(part, number, self.holders(part.rank), durable, self._note)

    def _note(self, note: str) -> None:
        self.rejected.append(note)
        self._tiers.skipped(note)

    def copies_of_part(self, rank: int) -> tuple[Part, list[Copies]]:
        """Returns a rank's part, and copies of each of its files; raises CorruptCheckpointError if no node has it."""
        part = self.part(rank)
        if part is None:
            why = "; ".join(self.rejected) or "no node has it"
            raise CorruptCheckpointError(why, operation="restore", tier="peer", key=self._candidate.name)
        stores = self.holders(rank)
        return part, [copies_at(part, number, stores, (), self._note) for number in range(len(part.content.files))]

    def close(self) -> None:
        """Ends all connections."""
        for store in self._stores.values():
            store.close()


def fan_out(candidate: Candidate, nodes: Sequence[str]) -> dict[str, str]:
    """Returns the node from which each node without a copy reads a full checkpoint first; pure.

    A node that reads it serves what it has verified, so no node serves more than CHILDREN others: a copy reaches 128
    nodes over 7 steps, each of which is a chunk behind the one before. If a step fails, a reader takes a node that
    holds all of it.
    """
    if candidate.content.kind != "full":
        return {}
    reading = [name for name in dict.fromkeys(nodes) if name not in candidate.held]
    sources = [name for _ in range(CHILDREN) for name in candidate.held]
    return dict(zip(reading, [*sources, *(name for name in reading for _ in range(CHILDREN))], strict=False))


def adopt_orphans(tiers: Tiers, candidate: Candidate, node: str) -> None:
    """Makes replicas of lost nodes' parts this node's own, so that its drain uploads them.

    A failure is logged: the replica is still there.
    """
    for part in candidate.orphans(node):
        try:
            tiers.memory.adopt(tiers.memory.find(candidate.save_id, part), drained=False)
        except Exception as error:
            tiers.log.warning("part %d of %s stays a replica: %s", part, candidate.name, error)
