"""The search for a checkpoint to load: one loop for every payload, and one place for its errors.

Rank 0 alone asks the durable tier what is there, and chooses; the lowest rank of each node tells it what the node's
memory holds. All ranks then try the same candidate, and go on to the next one if it is not intact on any node. Whatever
fails on rank 0 reaches all ranks with its answer, so that none waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from tiered_checkpoint_io.engine.ranks.coordination import Group, portable, raise_first
from tiered_checkpoint_io.engine.restore.catalog import DurableCatalog, NodeCatalog, Tiers, discover, read_more
from tiered_checkpoint_io.engine.restore.choice import (
    Candidate,
    Catalog,
    Evidence,
    Selector,
    choose,
    refuse_other_kind,
)
from tiered_checkpoint_io.engine.restore.fetcher import NodeFetcher
from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Kind

_T = TypeVar("_T")


@dataclass(slots=True)
class _Turn:
    """What rank 0 tells the others to try next.

    Attributes:
        candidate: The checkpoint; None where nothing is left.
        rejected: What was not taken since the last turn, and why.
        newest: The newest save that was seen in any tier.
        suspects: At the end: damage that may, or may not, have been what is wanted.
        foreign_size: At the end: bytes of an object of the wanted name that has no manifest.
        error: What ends the search on all ranks.
    """

    candidate: Candidate | None = None
    rejected: list[str] = field(default_factory=list)
    newest: str | None = None
    suspects: list[str] = field(default_factory=list)
    foreign_size: int | None = None
    error: TieredCheckpointError | None = None


class Search:
    """One search; its public state is the same on all ranks."""

    def __init__(
        self,
        tiers: Tiers,
        fetcher: NodeFetcher,
        selector: Selector,
        accepts: Kind,
        group: Group,
        evidence: Evidence | None = None,
    ) -> None:
        """Looks at nothing yet.

        Args:
            tiers: Where to look.
            fetcher: This node's.
            selector: What is wanted.
            accepts: The payload that can be loaded.
            group: The ranks that load together.
            evidence: See :func:`choose`.
        """
        self._tiers = tiers
        self._fetcher = fetcher
        self.selector = selector
        self._accepts: Kind = accepts
        self._group = group
        self._evidence = evidence
        #: For what is said of this rank.
        self._rank = group.rank if evidence is None or evidence.part is None else evidence.part
        #: The node of each rank.
        self.nodes: list[str] = []
        #: What was tried, or could not be read, and why it was not taken.
        self.rejected: list[str] = []
        #: The newest save that was seen in any tier; later runs count on from there.
        self.newest: str | None = None
        #: Bytes of an object of the wanted name that has no manifest; to be asked at the end.
        self.foreign_size: int | None = None
        self._suspects: list[str] = []
        #: On rank 0: what the tiers hold, and what of it is left to try.
        self._memory: dict[str, NodeCatalog] = {}
        self._durable: DurableCatalog | None = None
        self._options: list[Candidate] = []
        self._tried: set[str] = set()
        self._notes: list[str] = []
        self._seen: set[str] = set()
        self._failed: TieredCheckpointError | None = None

    # ------------------------------------------------------------------------------------ looking
    def look(self, damaged: Collection[str] = ()) -> NodeCatalog | None:
        """Has the lowest rank of each node list its memory; every rank calls this.

        Args:
            damaged: Ids of saves that this rank has found damaged.

        Returns:
            What this rank listed; None where another rank of its node did.
        """
        gathered: list[tuple[str, list[str]]] = self._group.all_gather((self._group.node, sorted(damaged)))
        self.nodes = [node for node, _ in gathered]
        self._tried = {save_id for _, theirs in gathered for save_id in theirs}
        self.reject(f"save {save_id}: damaged" for save_id in sorted(self._tried))
        mine: NodeCatalog | None = None
        failed: Exception | None = None
        if self.leads:
            try:
                mine = self._fetcher.look(self._rank)
            except Exception as error:
                failed = error
        told: list[tuple[NodeCatalog | None, TieredCheckpointError | None]] | None
        told = self._group.gather((mine, portable(failed, self._rank)))
        if told is not None:
            self._failed = next((error for _, error in told if error is not None), None)
            found = zip(self.nodes, (catalog for catalog, _ in told), strict=True)
            self._memory = {node: catalog for node, catalog in found if catalog is not None}
            self._take_memory()
        return mine

    def check(self) -> None:
        """Raises what ended the search while it looked; :meth:`run` does the same on all ranks."""
        raise_first([self._failed])

    @property
    def leads(self) -> bool:
        """Whether this is the lowest rank of its node: it verifies and fetches for all others there."""
        return self.leader_of(self._group.node) == self._group.rank

    def leader_of(self, node: str) -> int:
        """The lowest rank of a node."""
        return self.nodes.index(node)

    def _take_memory(self) -> None:
        nodes = self._memory.values()
        self._seen |= {held.content.save_id for node in nodes for held in node.held}
        damaged = [note for node in nodes for note in node.damaged]
        self._suspects = [*damaged, *(note for node in nodes for note in node.quarantined)]
        if self.selector.kind != "name":
            self._notes += damaged
            # A newer release's part may be the newest of all; nobody here can tell.
            self._failed = self._failed or next((node.newer for node in nodes if node.newer is not None), None)

    # ------------------------------------------------------------------------------------ trying
    def run(self, attempt: Callable[[Candidate], _T | None]) -> _T | None:
        """Tries one candidate after the other; every rank calls this, after :meth:`look`.

        Args:
            attempt: Called on all ranks with the same candidate; None where it is not intact on some node.

        Returns:
            What ``attempt`` returned; None where nothing is left to try.

        Raises:
            OtherKindError: What is meant has another payload.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            FormatVersionError: A newer release wrote what would have to be chosen.
        """
        while True:
            turn: _Turn = self._group.broadcast(self._next() if self._group.rank == 0 else None)
            raise_first([turn.error])
            self.reject(turn.rejected)
            self.newest = turn.newest
            if turn.candidate is None:
                self._suspects, self.foreign_size = turn.suspects, turn.foreign_size
                return None
            found = attempt(turn.candidate)
            if found is not None:
                return found

    def reject(self, notes: Iterable[str]) -> None:
        """Notes why something was not taken, once."""
        self.rejected += [note for note in dict.fromkeys(notes) if note not in self.rejected]

    def _next(self) -> _Turn:
        """Rank 0's choice. Never raises: the others wait for it."""
        try:
            self.check()
            while not self._options and (self._durable is None or self._durable.rest):
                self._read()
            candidate = self._options.pop(0) if self._options else None
            if candidate is not None:
                refuse_other_kind(candidate, self._accepts, self._tiers.dirpath)
                self._tried.add(candidate.save_id)
        except Exception as error:
            return _Turn(error=portable(error, self._rank))
        notes, self._notes = self._notes, []
        turn = _Turn(candidate, notes, max(self._seen, default=None))
        if candidate is None:
            assert self._durable is not None
            turn.suspects, turn.foreign_size = self._suspects, self._durable.foreign_size
        return turn

    def _read(self) -> None:
        """Reads what the durable tier says, or more of it, and chooses from that and memory."""
        aliases = self._memory[self._group.node].aliases
        if self._durable is None:
            self._durable = discover(self._tiers, self.selector, aliases)
        else:
            # None of the newest is intact: older ones are better than none.
            self._durable = read_more(self._tiers, self._durable)
        known = self._durable
        for note in known.rejected:
            self._tiers.skipped(note)
        self._notes += known.rejected
        self._seen |= {manifest.content.save_id for manifest in known.manifests}
        memory = {node: catalog.held for node, catalog in self._memory.items()}
        options = choose(Catalog(memory, known.manifests, aliases), self.selector, self._accepts, self._evidence)
        self._options = [each for each in options if each.save_id not in self._tried]
        if known.error is not None:
            # Training must go on while S3 is away, if memory can carry it; but nobody may start from scratch because
            # S3 did not answer.
            if not self._options or not known.error.retryable:
                raise known.error
            self._notes.append(f"durable {self._tiers.dirpath}: {known.error}")
            self._tiers.log.warning("the durable tier does not answer; restoring from node memory: %s", known.error)

    # ------------------------------------------------------------------------------------ the end
    def nothing(self) -> RestoreError | CheckpointNotFoundError:
        """Why nothing was found: there is nothing, or nothing of it is intact; the same on all ranks."""
        selector = self.selector
        what = "checkpoint" if self._accepts == "full" else f"{self._accepts} checkpoint"
        key, by_name = self._tiers.dirpath, selector.kind == "name"
        if by_name:
            what, key = f"{what} {selector.name!r}", ids.join_url(key, selector.name)
        if selector.step is not None:
            what += f" of step {selector.step}"
        # What an earlier start found corrupt must not become a start from scratch on the next one.
        damage = list(dict.fromkeys([*self.rejected, *self._suspects]))
        if self.rejected or (damage and not by_name):
            return RestoreError(
                f"no {what} is intact: " + "; ".join(damage),
                operation="restore",
                key=key,
                rank=self._rank,
                step=selector.step,
                hint=f"corrupt parts of memory lie in {self._tiers.memory.root}/quarantine; to start from scratch,"
                " remove what is damaged",
            )
        return CheckpointNotFoundError(
            f"no {what} in memory or at {self._tiers.dirpath}"
            + (f" (it may have been: {'; '.join(damage)})" if damage else ""),
            operation="restore",
            key=key,
            rank=self._rank,
            step=selector.step,
            hint="see `tiered-ckpt ls` for those that exist"
            + ("; local ones that several nodes hold in memory alone are loaded by name" if self._evidence else ""),
        )
