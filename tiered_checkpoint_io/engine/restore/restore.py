"""Restore: find the candidates, bring the best one to every node, verify it, and agree on it.

Rank 0 alone asks the durable tier what is there. On each node one process verifies or fetches;
the others map the same pages. A node that has no copy gets it from one that has, and only where none has
from the durable tier. A bad copy leads to the next source, then to the next candidate; it is quarantined
and reported, never loaded.

Whatever fails on one rank is carried to the next exchange of all ranks and raised there on each of
them, so that none waits for one that has left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tiered_checkpoint_io.engine.ranks.carrying import send_part, text_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, agree, portable, raise_first
from tiered_checkpoint_io.engine.restore.bring import Bringer, Brought
from tiered_checkpoint_io.engine.restore.choice import Candidate, Selector, Tier, candidates, spread
from tiered_checkpoint_io.engine.restore.discovery import Here, Known, discover, read_more
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    OtherKindError,
    RestoreError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, gib
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Content, Part
from tiered_checkpoint_io.stores.base import Store


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

    def release(self) -> None:
        """Lets the file go. What was mapped from it meanwhile lives on, unchanged."""
        self._held.close()


@dataclass(slots=True)
class _Search:
    """What one call of ``restore`` has learnt so far; the same on all ranks.

    Attributes:
        selector: What is wanted.
        started: When the call began, by the monotonic clock.
        leaders: The lowest rank of each node: it verifies and fetches for all others there.
        seen: Save ids that were found in any tier.
        rejected: What was tried, or could not be read, and why it was not taken.
        suspects: Damage that may, or may not, have been what is wanted.
    """

    selector: Selector
    started: float
    leaders: dict[str, int]
    seen: set[str]
    rejected: list[str]
    suspects: list[str]

    def reject(self, notes: list[str]) -> None:
        self.rejected += [note for note in dict.fromkeys(notes) if note not in self.rejected]


class Restorer:
    """Restores from one durable tier and the memory of the nodes."""

    def __init__(
        self,
        config: TieredCheckpointConfig,
        tier: MemoryTier,
        store: Callable[[], Store],
        logger: Logger,
        dirpath: str | None = None,
    ) -> None:
        """Takes the tiers.

        Args:
            config: For bounds and concurrency.
            tier: This node's memory.
            store: Opens the durable tier; called on rank 0, and where bytes are fetched.
            logger: Where to log.
            dirpath: The durable tier, where it is another than the configuration's.
        """
        self._tier = tier
        self._store = store
        self._log = logger
        self._dirpath = dirpath or config.dirpath
        #: All names on the durable tier, where this rank listed them.
        self.listed: set[str] | None = None
        self._bringer = Bringer(config, tier, store, logger, self._dirpath)

    def restore(self, selector: Selector, group: Group) -> Restored | None:
        """Brings the checkpoint that ``selector`` means to every node.

        Every rank of ``group`` calls this, and all return the same checkpoint or raise the same
        error.

        Returns:
            The checkpoint, to be released once it is loaded; None where no tier holds any, and
            each has said so.

        Raises:
            CheckpointNotFoundError: There is none of the name that was asked for.
            RestoreError: There are some, but none is intact.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            FormatVersionError: A newer release wrote what would have to be chosen.
        """
        started = time.monotonic()
        here, failed = Here(), None
        try:
            here = self._bringer.look(group.rank)
        except Exception as error:
            failed = error
        gathered: list[tuple[str, Here, TieredCheckpointError | None]] = group.all_gather(
            (group.node, here, portable(failed, group.rank))
        )
        raise_first((error for _, _, error in gathered), failed)
        nodes = {node: theirs for node, theirs, _ in reversed(gathered)}
        if selector.kind != "name":
            # It may be the newest of all; nobody here can tell.
            raise_first(theirs.newer for theirs in nodes.values())
        memory = {node: theirs.held for node, theirs in nodes.items()}
        aliases = gathered[0][1].aliases
        damaged = [note for _, theirs, _ in gathered for note in theirs.damaged]
        search = _Search(
            selector=selector,
            started=started,
            leaders={node: rank for rank, (node, _, _) in reversed(list(enumerate(gathered)))},
            seen={held.content.save_id for holdings in memory.values() for held in holdings},
            rejected=list(dict.fromkeys(damaged)) if selector.kind != "name" else [],
            suspects=list(dict.fromkeys([*damaged, *(note for _, t, _ in gathered for note in t.quarantined)])),
        )
        found: Known | None = None
        if group.rank == 0:
            found = discover(self._store, selector, aliases)
            self.listed, found.listed = found.listed, None
        known: Known = group.broadcast(found)
        tried: set[str] = set()
        while True:
            if group.rank == 0:
                for note in known.rejected:
                    self._log.error("not restored, looking further: %s", note)
            search.reject(known.rejected)
            search.seen |= {manifest.content.save_id for manifest in known.manifests}
            options = [
                candidate
                for candidate in candidates(memory, known.manifests, selector, aliases)
                if candidate.content.save_id not in tried
            ]
            self._check_error(known, options, search, group)
            for candidate in options:
                tried.add(candidate.content.save_id)
                restored = self._try(candidate, search, group)
                if restored is not None:
                    return restored
            if not known.rest:
                break
            # None of the newest is intact: older ones are better than none.
            known = group.broadcast(read_more(self._store, known) if group.rank == 0 else None)
        if selector.kind == "name" and not search.rejected:
            return self._foreign(known, search, group)
        # What an earlier start found corrupt must not become a start from scratch on the next one.
        search.reject(search.suspects)
        if search.rejected:
            raise RestoreError(
                "no checkpoint is intact: " + "; ".join(search.rejected),
                operation="restore",
                key=self._dirpath,
                rank=group.rank,
                hint=f"corrupt parts of memory lie in {self._tier.root}/quarantine; to start from scratch,"
                " remove what is damaged",
            )
        return None

    # ------------------------------------------------------------------------------- discovery
    def _check_error(self, known: Known, options: list[Candidate], search: _Search, group: Group) -> None:
        if known.error is None:
            return
        # Training must go on while S3 is away, if memory can carry it; but nobody may start from
        # scratch because S3 did not answer.
        if not options or not known.error.retryable:
            raise known.error
        search.reject([f"durable {self._dirpath}: {known.error}"])
        if group.rank == 0:
            self._log.warning("restoring from memory alone: %s", known.error)

    # -------------------------------------------------------------------------------- bringing
    def _try(self, candidate: Candidate, search: _Search, group: Group) -> Restored | None:
        """Has every node's leader bring a candidate; None where some node could not get it intact."""
        if candidate.content.kind != "full":
            raise OtherKindError(
                f"{candidate.name} is a {candidate.content.kind} checkpoint, not a full one",
                operation="restore",
                key=ids.join_url(self._dirpath, candidate.name),
                step=candidate.content.step,
                hint="load it by tiered_checkpoint_io.dcp or with a sharded strategy of this package, or make a full"
                " one of it: tiered-ckpt export",
            )
        here = self._share(self._bring(candidate, search, group), search, group)
        return None if here is None else self._settle(candidate, here, search, group)

    def _bring(self, candidate: Candidate, search: _Search, group: Group) -> Brought | None:
        """This node's copy, on its leader: from its own memory, from another node's, or from the durable tier."""
        leads, sources = search.leaders[group.node] == group.rank, candidate.sources[group.node]
        mine = self._bringer.bring(candidate, ("memory",) if "memory" in sources else (), group.rank) if leads else None
        if any("peer" in each for each in candidate.sources.values()):
            mine = self._from_peers(candidate, mine, group)
        if mine is not None and mine.path is None and mine.error is None and "durable" in sources:
            fetched = self._bringer.bring(candidate, ("durable",), group.rank)
            fetched.rejected = mine.rejected + fetched.rejected
            return fetched
        return mine

    def _from_peers(self, candidate: Candidate, mine: Brought | None, group: Group) -> Brought | None:
        """Has leaders whose memory has it send it to those whose memory has not."""
        described: Part | None = None
        if mine is not None and mine.path is not None:
            try:
                stored = self._bringer.find(candidate.content.save_id)
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
                problem = send_part(group, self._tier, part, target)
                if problem is not None:
                    self._log.error("rank %d did not get an intact copy: %s", target, text_of(problem))
            elif group.rank == target:
                assert mine is not None
                # Of what only copies are left, one node takes over what the lost one would have done.
                received = self._bringer.from_peer(
                    part, group, source, drained=not (candidate.orphaned and group.rank == 0)
                )
                received.rejected = mine.rejected + received.rejected
                mine = received
        return mine

    def _share(self, mine: Brought | None, search: _Search, group: Group) -> Brought | None:
        """Tells all ranks how the leaders fared; the outcome on this node, if all succeeded."""
        outcomes: list[Brought | None] = group.all_gather(mine)
        led = [brought for brought in outcomes if brought is not None]
        search.reject([note for brought in led for note in brought.rejected])
        failed = any(brought.path is None for brought in led)
        if failed and mine is not None and mine.temporary and mine.path is not None:
            os.unlink(mine.path)
        raise_first((brought.error for brought in led), mine.error if mine else None)
        if failed:
            return None
        here = outcomes[search.leaders[group.node]]
        assert here is not None
        if mine is None:
            here.bytes_read = 0
        return here

    def _settle(self, candidate: Candidate, here: Brought, search: _Search, group: Group) -> Restored:
        """Holds the file on every rank, so that nothing takes it away before it is loaded."""
        assert here.path is not None
        restored = Restored(
            name=candidate.name,
            content=candidate.content,
            tier=here.tier,
            path=Path(here.path),
            seconds=0.0,
            bytes_read=here.bytes_read,
            rejected=search.rejected,
            newest_save_id=max(search.seen, default=None),
        )
        failed: Exception | None = None
        try:
            if here.temporary:
                restored._held.callback(_unlink, here.path)
            else:
                stored = self._bringer.find(candidate.content.save_id)
                restored._held.enter_context(self._tier.reading(stored, keep=True))
                restored.content = stored.part.content
        except Exception as error:
            failed = error
        try:
            agree(group, failed)
        except BaseException:
            restored.release()
            raise
        restored.seconds = time.monotonic() - search.started
        if group.rank == 0:
            self._log.info(
                "Step %d: resuming from %s (%s, %s) after %.2f s",
                restored.step,
                restored.name,
                restored.tier,
                gib(candidate.content.size),
                restored.seconds,
            )
        return restored

    # ------------------------------------------------------------------------- written by others
    def _foreign(self, known: Known, search: _Search, group: Group) -> Restored:
        """A full checkpoint that others wrote: it has no manifest, so nothing can verify it."""
        name = search.selector.name
        if known.foreign_size is None:
            raise CheckpointNotFoundError(
                f"no checkpoint {name!r} in memory or at {self._dirpath}"
                + (f" (it may have been: {'; '.join(search.suspects)})" if search.suspects else ""),
                operation="restore",
                key=ids.join_url(self._dirpath, name),
                hint="see `tiered-ckpt ls` for those that exist",
            )
        if group.rank == 0:
            self._log.warning("%s has no manifest: it is loaded, but nothing verified it", name)
        leads = search.leaders[group.node] == group.rank
        mine = self._bringer.bring_foreign(name, known.foreign_size, group.rank) if leads else None
        here = self._share(mine, search, group)
        assert here is not None
        assert here.path is not None
        seconds = time.monotonic() - search.started
        newest = max(search.seen, default=None)
        restored = Restored(name, None, "durable", Path(here.path), seconds, here.bytes_read, [], newest)
        if here.temporary:
            restored._held.callback(_unlink, here.path)
        return restored


def _unlink(path: str) -> None:
    # The first rank of the node to come does it; by then all have opened the file.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def open_restored(tier: MemoryTier, restored: Restored) -> Iterator[Path]:  # noqa: ARG001
    """The local file of a restored checkpoint, held while it is loaded.

    What the block maps may live on: the file is never written to again.
    """
    try:
        yield restored.path
    finally:
        restored.release()
