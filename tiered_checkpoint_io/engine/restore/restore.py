"""Restoring a checkpoint of one file: the best candidate is fetched to every node, verified, and agreed on.

Which one it is, rank 0 chooses for all: see ``search``. On each node one process verifies or fetches;
the others map the same pages. A node that has no copy gets it from one that has, and only where none has
from the durable tier. A bad copy leads to the next source, then to the next candidate; it is quarantined
and reported, never loaded.

Whatever fails on one rank is carried to the next exchange of all ranks and raised there on each of
them, so that none waits for one that has left.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tiered_checkpoint_io.engine.ranks.coordination import Group, agree, raise_first
from tiered_checkpoint_io.engine.ranks.transfer import GroupChannel, send_held_part, text_of
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Selector, Tier, spread
from tiered_checkpoint_io.engine.restore.fetcher import FetchResult, NodeFetcher
from tiered_checkpoint_io.engine.restore.search import Search
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.logs import gib
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Part


@dataclass(slots=True)
class Restored:
    """A checkpoint that lies, verified, on this node, and stays there until it is released.

    Attributes:
        name: Its name.
        content: What it holds; None for a file that others wrote, which nothing verified.
        tier: Where this node had it from.
        path: The local file.
        seconds: How long it took to find, fetch and verify.
        bytes_read: Bytes that this process read from the durable tier.
        rejected: What was tried before it, and why it was not taken.
        newest_save_id: The newest save seen in any tier; later runs count on from there.
    """

    name: str
    content: Content | None
    tier: Tier
    path: Path
    seconds: float
    bytes_read: int
    rejected: list[str]
    newest_save_id: str | None
    _held: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def step(self) -> int:
        """The training step; -1 where the checkpoint does not tell."""
        if self.content is not None:
            return self.content.step
        step = ids.step_in_name(self.name)
        return -1 if step is None else step

    def hold(self, reading: contextlib.AbstractContextManager[object]) -> None:
        """Keeps the file where it is until :meth:`release`."""
        self._held.enter_context(reading)

    def __enter__(self) -> Restored:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets the file go. What was mapped from it meanwhile lives on, unchanged."""
        self._held.close()


class Restorer:
    """Restores checkpoints of one file, from one durable tier and the memory of the nodes."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tier = tiers.memory
        self._fetcher = NodeFetcher(tiers)

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
        started = self._tiers.clock.monotonic()
        search = Search(self._tiers, self._fetcher, selector, "full", group)
        search.look()
        restored = search.run(lambda candidate: self._try(candidate, search, group))
        if restored is None and search.foreign_size is not None and not search.rejected:
            restored = self._foreign(search, group)
        if restored is None:
            nothing = search.nothing()
            if selector.kind == "name" or not isinstance(nothing, CheckpointNotFoundError):
                raise nothing
            return None
        restored.seconds = self._tiers.clock.monotonic() - started
        restored.rejected, restored.newest_save_id = search.rejected, search.newest
        if group.rank == 0 and restored.content is not None:
            self._tiers.log.info(
                "Step %d: resuming from %s (%s, %s) after %.2f s",
                restored.step,
                restored.name,
                restored.tier,
                gib(restored.content.size),
                restored.seconds,
            )
        return restored

    # -------------------------------------------------------------------------------- fetching
    def _try(self, candidate: Candidate, search: Search, group: Group) -> Restored | None:
        """Has every node's leader fetch a candidate; None where some node could not get it intact."""
        here = self._share(self._fetch(candidate, search, group), search, group)
        return None if here is None else self._settle(candidate, here, group)

    def _fetch(self, candidate: Candidate, search: Search, group: Group) -> FetchResult | None:
        """This node's copy, on its leader: from its own memory, from another node's, or from the durable tier."""
        sources = candidate.sources(group.node)
        mine: FetchResult | None = None
        if search.leads:
            mine = self._fetcher.fetch(candidate, ("memory",) if "memory" in sources else (), group.rank)
        if any("peer" in candidate.sources(node) for node in set(search.nodes)):
            mine = self._from_peers(candidate, mine, group)
        if mine is not None and mine.path is None and mine.error is None and "durable" in sources:
            fetched = self._fetcher.fetch(candidate, ("durable",), group.rank)
            fetched.rejected = mine.rejected + fetched.rejected
            return fetched
        return mine

    def _from_peers(self, candidate: Candidate, mine: FetchResult | None, group: Group) -> FetchResult | None:
        """Has leaders whose memory has it send it to those whose memory has not."""
        described: Part | None = None
        if mine is not None and mine.path is not None:
            try:
                stored = self._fetcher.find(candidate.content.save_id)
                if candidate.orphaned and group.rank == 0 and stored.is_replica:
                    stored = self._tier.adopt(stored, drained=False)
                    mine.path = str(stored.file(stored.part.content.files[0].basename))
                described = stored.part
            except Exception as error:
                # The others wait to hear who has it.
                mine.path, mine.rejected = None, [*mine.rejected, f"rank {group.rank}: {text_of(error)}"]
        outcomes: list[tuple[bool, Part | None]] = group.all_gather(
            (mine is not None and mine.error is None, described)
        )
        holders = [rank for rank, (_, part) in enumerate(outcomes) if part is not None]
        lacking = [rank for rank, (leads, part) in enumerate(outcomes) if leads and part is None]
        if not holders:
            return mine
        part = outcomes[holders[0]][1]
        assert part is not None
        for source, target in spread(holders, lacking):
            if group.rank == source:
                problem = send_held_part(GroupChannel(group, target), self._tier, part)
                if problem:
                    self._tiers.log.error("rank %d did not get an intact copy: %s", target, problem)
            elif group.rank == target:
                assert mine is not None
                # Of what only copies are left, one node takes over what the lost one would have done.
                received = self._fetcher.from_peer(
                    part, group, source, drained=not (candidate.orphaned and group.rank == 0)
                )
                received.rejected = mine.rejected + received.rejected
                mine = received
        return mine

    def _share(self, mine: FetchResult | None, search: Search, group: Group) -> FetchResult | None:
        """Shares with all ranks how the leaders fared; the outcome on this node, if all succeeded."""
        outcomes: list[FetchResult | None] = group.all_gather(mine)
        led = [each for each in outcomes if each is not None]
        search.reject([note for each in led for note in each.rejected])
        failed = any(each.path is None for each in led)
        if failed and mine is not None and mine.temporary and mine.path is not None:
            os.unlink(mine.path)
        raise_first((each.error for each in led), mine.error if mine else None)
        if failed:
            return None
        here = outcomes[search.leader_of(group.node)]
        assert here is not None
        if mine is None:
            here.bytes_read = 0
        return here

    def _settle(self, candidate: Candidate, here: FetchResult, group: Group) -> Restored:
        """Holds the file on every rank, so that nothing takes it away before it is loaded."""
        restored = restored_from(here, candidate.name, candidate.content)
        failed: Exception | None = None
        try:
            if not here.temporary:
                stored = self._fetcher.find(candidate.save_id)
                restored.hold(self._tier.reading(stored, keep=True))
                restored.content = stored.part.content
        except Exception as error:
            failed = error
        try:
            agree(group, failed)
        except BaseException:
            restored.release()
            raise
        return restored

    # ------------------------------------------------------------------------- written by others
    def _foreign(self, search: Search, group: Group) -> Restored:
        """A full checkpoint that others wrote: it has no manifest, so nothing can verify it."""
        name = search.selector.name
        assert search.foreign_size is not None
        if group.rank == 0:
            self._tiers.log.warning("%s has no manifest: it is loaded, but nothing verified it", name)
        mine = self._fetcher.fetch_foreign(name, search.foreign_size, group.rank) if search.leads else None
        here = self._share(mine, search, group)
        assert here is not None
        return restored_from(here, name, None)


def restored_from(fetched: FetchResult, name: str, content: Content | None) -> Restored:
    """What a node has fetched, as it is given to the caller."""
    assert fetched.path is not None
    restored = Restored(name, content, fetched.tier, Path(fetched.path), 0.0, fetched.bytes_read, [], None)
    if fetched.temporary:
        restored._held.callback(_unlink, fetched.path)
    return restored


def _unlink(path: str) -> None:
    # The first rank of the node to come does it; by then all have opened the file.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
