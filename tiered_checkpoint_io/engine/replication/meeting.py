"""Where ranks agree on who keeps replicas of whose parts: once a process, before the first save."""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.coordination import GivenGroup, Group, TorchGroup, node_of, portable, raise_first
from tiered_checkpoint_io.engine.replication.local_peers import LocalPeers
from tiered_checkpoint_io.engine.replication.peer_link import Board
from tiered_checkpoint_io.engine.replication.placement import peers_of_ranks
from tiered_checkpoint_io.engine.replication.replication import Clique, Replicator
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


class Peering:
    """What one session has to do with peers: for each group of ranks that save together, one replicator."""

    def __init__(self, config: TieredCheckpointConfig, counts: Counter[str], clock: Clock) -> None:
        """Takes what does not change.

        Args:
            config: For factor, jump and bounds.
            counts: ``replicated`` and ``unreplicated`` parts.
            clock: The session's.
        """
        self._config = config
        self._counts = counts
        self._clock = clock
        self._replicators: dict[object, Replicator] = {}
        self._local: tuple[object, LocalPeers] | None = None
        #: Who sends what is saved now.
        self._current: Replicator | None = None

    def meet(self, open_tier: Callable[[], MemoryTier], logger: Logger, process_group: Any) -> None:
        """Prepares copies in the memory of peers, once; every rank of the group calls this, on its main thread.

        Does nothing where ``replication_factor`` is 1, or these ranks have met before.

        Args:
            open_tier: Opens this node's memory.
            logger: Where to log.
            process_group: The ranks that save together; all of them where it is None.

        Raises:
            UsageError: There are fewer nodes than copies, or some rank did not come.
            MemoryTierError: Some rank can't use its memory tier.
        """
        if self._config.replication_factor == 1:
            return
        key = key_of(process_group)
        if key not in self._replicators:
            self._replicators[key] = meet(open_tier, self._config, logger, self._counts, process_group, self._clock)
            if len(self._replicators) == 1:
                # Threads that call into torch must have ended before the interpreter does.
                atexit.register(self.close, self._clock.timing.replication_release_s)
        self._current = self._replicators[key]

    def local(self, tier: MemoryTier, logger: Logger) -> LocalPeers | None:
        """What ranks have for each other when they load local checkpoints; None where there are no copies, or others.

        Makes no collective call.

        Args:
            tier: This node's memory.
            logger: Where to log.

        Raises:
            PeerError: The store of torch.distributed does not answer.
        """
        import torch.distributed as dist

        if self._config.replication_factor == 1 or not (dist.is_available() and dist.is_initialized()):
            return None
        store = dist.distributed_c10d._get_default_store()
        if self._local is None or self._local[0] is not store:
            rank, world_size = dist.get_rank(), dist.get_world_size()
            board = Board(store, f"local/{self._config.namespace}", rank, self._clock)
            timeout_s = float(self._config.wait_timeout_s)
            peers = LocalPeers(tier, board, rank, world_size, logger, timeout_s=timeout_s)
            self._local = store, peers
            atexit.register(self.close, self._clock.timing.replication_release_s)
        return self._local[1]

    def committed(self, stored: StoredPart, logger: Logger) -> None:
        """Takes each part that is saved on this node by this process."""
        if self._config.replication_factor == 1:
            return
        if self._current is not None:
            self._current.offer(stored)
            return
        self._counts["unreplicated"] += 1
        logger.warning(
            "Step %d: %s was not replicated, only this node has it: meet_peers() was not called on the main threads",
            stored.part.content.step,
            stored.part.name,
        )

    @property
    def pending(self) -> int:
        """Parts that are still on their way."""
        return sum(each.pending for each in self._replicators.values())

    def close(self, timeout_s: float) -> None:
        """Sends what is queued, within the bound, and ends; :meth:`meet` may be called again."""
        atexit.unregister(self.close)
        replicators, self._replicators, self._current = list(self._replicators.values()), {}, None
        local, self._local = self._local, None
        if local is not None:
            local[1].close()
        for each in replicators:
            each.close(timeout_s)


def key_of(process_group: Any) -> object:
    """Identifies the ranks that save together: which they are, in which start of the job."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    return dist.distributed_c10d._get_default_store(), tuple(ranks)


def meet(
    open_tier: Callable[[], MemoryTier],
    config: TieredCheckpointConfig,
    logger: Logger,
    counts: Counter[str],
    process_group: Any,
    clock: Clock,
) -> Replicator:
    """Has the ranks agree on their peers, and starts replication.

    Args:
        open_tier: Opens this node's memory.
        config: For factor, jump and bounds.
        logger: Where to log.
        counts: Where to count.
        process_group: The ranks; all of them where it is None.
        clock: The session's.

    Raises:
        UsageError: There are fewer nodes than copies, or some rank did not come; on all ranks.
        MemoryTierError: Some rank can't use its memory tier; on all ranks.
    """
    import torch.distributed as dist

    factor = config.replication_factor
    if not (dist.is_available() and dist.is_initialized()):
        peers_of_ranks(["here"], factor=factor, jump=config.replication_jump)
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "replication was set up from a thread",
            operation="replicate",
            hint="make the first save, or session.meet_peers(), on the main thread of every rank",
        )
    tier, held, error = None, [], None
    try:
        tier = open_tier()
        held = [(each.save_id, each.part.rank) for each in tier.replicas.parts()]
    except Exception as caught:
        # The others wait in the first exchange: they get the error there.
        error = caught
    node = node_of(tier.root if tier is not None else Path("/"))
    group: Group
    if process_group is None or dist.get_world_size(process_group) == dist.get_world_size():
        group = TorchGroup(node, clock, timeout_s=float(config.wait_timeout_s), what="the set-up of replication")
    else:
        group = GivenGroup(node, process_group)
    try:
        gathered = group.all_gather((node, held, clock.token(8), portable(error, group.rank)))
        raise_first((theirs for _, _, _, theirs in gathered), error)
        nodes = [each for each, _, _, _ in gathered]
        peers = peers_of_ranks(nodes, factor=factor, jump=config.replication_jump)
        clique = Clique.of(group.rank, peers)
        boards: tuple[Board, Board] | None = None
        try:
            store = dist.distributed_c10d._get_default_store()
            token = gathered[0][2]
            boards = Board(store, token, group.rank, clock), Board(store, token, group.rank, clock)
        except Exception as caught:
            error = caught
        raise_first(group.all_gather(portable(error, group.rank)), error)
    finally:
        group.close()
    assert tier is not None
    assert boards is not None
    replicator = Replicator(
        tier,
        clique,
        boards,
        logger,
        counts,
        keep_last=config.memory_keep_last,
        timeout_s=float(config.wait_timeout_s),
    )
    copied = [set(theirs) for _, theirs, _, _ in gathered]
    _catch_up(tier, replicator, clique, [copied[target] for target in clique.targets])
    return replicator


def _catch_up(tier: MemoryTier, replicator: Replicator, clique: Clique, kept: list[set[tuple[str, int]]]) -> None:
    """Sends this rank's newest part again where a peer has lost it, or never had it."""
    mine = [stored for stored in tier.parts() if stored.part.rank == clique.rank]
    for stored in mine[-1:]:
        if any((stored.save_id, stored.part.rank) not in held for held in kept):
            replicator.offer(stored)
