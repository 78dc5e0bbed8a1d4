"""Restoring a checkpoint of one file: the best candidate is fetched to every node, verified, and agreed on.

Which one it is, rank 0 chooses for all: see ``search``. On each node one process verifies or fetches;
the others map the same pages. A node that has no copy gets it from one that has, and only where none has
from the durable tier. A bad copy leads to the next source, then to the next candidate; it is quarantined
and reported, never loaded.
"""

from __future__ import annotations

import os

from tiered_checkpoint_io.engine.ranks.coordination import Group, agree
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Selector
from tiered_checkpoint_io.engine.restore.fetcher import FetchedPart, NodeFetcher, Restored
from tiered_checkpoint_io.engine.restore.part_moves import carry, spread
from tiered_checkpoint_io.engine.restore.search import Outcome, Search
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.model.manifest import Part


class Restorer:
    """Restores checkpoints of one file, from one durable tier and the memory of the nodes."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._fetcher = NodeFetcher(tiers)
        self._started = 0.0

    def restore(self, selector: Selector, group: Group) -> Restored | None:
        """Fetches the checkpoint that ``selector`` means to every node.

        Every rank of ``group`` calls this, and all return the same checkpoint or raise the same
        error.

        Returns:
            The checkpoint, to be released once it is loaded; None where no tier holds any, and
            each has said so.

        Raises:
            CheckpointNotFoundError: There is none of the name that was asked for.
            RestoreError: There are some, but none is intact.
            OtherKindError: What is meant is no full checkpoint.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            FormatVersionError: A newer release wrote what would have to be chosen.
        """
        self._started = self._tiers.clock.monotonic()
        search = Search(self._tiers, selector, "full", group)
        search.look()
        restored = search.run(lambda candidate: self._try(candidate, search))
        if restored is None:
            if selector.kind == "name" or not isinstance(search.nothing, CheckpointNotFoundError):
                raise search.nothing
            return None
        if group.rank == 0:
            self._fetcher.report(restored)
        return restored

    def _try(self, candidate: Candidate, search: Search) -> Restored | None:
        """Has every node's leader fetch a candidate; None where some node could not get it intact."""
        group = search.group
        # Of what only replicas are left, one node takes over what the lost one would have done.
        takes_over = candidate.orphaned and group.rank == 0
        sources = candidate.sources(group.node)
        mine: Outcome[FetchedPart] | None = None
        if search.leads:
            mine = self._fetcher.fetch(candidate, "memory", search) if "memory" in sources else Outcome()
            if takes_over and mine.value is not None:
                mine = search.attempt(candidate, "memory", lambda: self._fetcher.adopt(candidate.save_id))
        if any("peer" in candidate.sources(node) for node in set(search.nodes)):
            mine = self._from_peers(candidate, mine, search, drained=not takes_over)
        if mine is not None and mine.is_open and "durable" in sources:
            mine = mine.then(self._fetcher.fetch(candidate, "durable", search))
        return self._share(mine, search)

    def _from_peers(
        self, candidate: Candidate, mine: Outcome[FetchedPart] | None, search: Search, *, drained: bool
    ) -> Outcome[FetchedPart] | None:
        """Has leaders whose memory has it send it to those whose memory has not."""
        told: list[tuple[bool, Part | None]] = search.group.all_gather(
            (mine is not None and mine.is_open, mine.value.part if mine is not None and mine.value else None)
        )
        parts = {rank: part for rank, (_, part) in enumerate(told) if part is not None}
        if not parts:
            return mine
        planned = spread(list(parts), [rank for rank, (lacks, _) in enumerate(told) if lacks])
        part = next(iter(parts.values()))

        def receive() -> FetchedPart | None:
            return carry(
                search.group,
                self._tiers,
                planned,
                {part.rank: part},
                lambda part: self._fetcher.place(part, drained=drained),
            )

        received = search.attempt(candidate, "peer", receive)
        return mine.then(received) if mine is not None and mine.is_open else mine

    def _share(self, mine: Outcome[FetchedPart] | None, search: Search) -> Restored | None:
        """What this node has, held on every rank, if all nodes have it."""
        everywhere = False
        try:
            outcomes = search.share(mine)
            everywhere = all(each is None or each.value is not None for each in outcomes)
        finally:
            if not everywhere and mine is not None and mine.value is not None and mine.value.temporary:
                os.unlink(mine.value.path)
        if not everywhere:
            return None
        here = outcomes[search.leader_of(search.group.node)]
        assert here is not None
        assert here.value is not None
        if mine is None:
            here.value.bytes_read = 0
        restored: Restored | None = None
        failed: Exception | None = None
        try:
            restored = self._fetcher.hold(here.value, search, self._started, keep=True)
        except Exception as error:
            failed = error
        try:
            agree(search.group, failed)
        except BaseException:
            if restored is not None:
                restored.release()
            raise
        return restored
