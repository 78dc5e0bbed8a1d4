"""Meeting of ranks: they agree on the placement of replicas, once a process, before the first save."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.coordination import (
    GivenGroup,
    Group,
    TorchGroup,
    agree,
    machine,
    node_of,
    trains_here,
)
from tiered_checkpoint_io.engine.ranks.store_client import StoreClient
from tiered_checkpoint_io.engine.replication.fates import FormKey, form_key, newest_of, newest_replicated
from tiered_checkpoint_io.engine.replication.network import Interface, interface_for, megabits_of, rate_text
from tiered_checkpoint_io.engine.replication.placement import peers_of_ranks, sender_of
from tiered_checkpoint_io.engine.replication.replicator import Member, Replicator
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger, of_step
from tiered_checkpoint_io.memory.node import memory_of
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.peer import Endpoint


class _Member(NamedTuple):
    """Report of one rank in the first exchange.

    Attributes:
        machine: The machine with its node's memory: both are lost together.
        memory: Its node's memory.
        replicas: Saves and ranks of the replicas on its node.
        parts: Saves and ranks of its own parts.
        newest: The newest save of its own parts.
        replicated: The newest saves that are marked as replicated there.
        token: A random value; the first rank's identifies this group in the store.
    """

    machine: str
    memory: str
    replicas: set[tuple[str, int]]
    parts: set[tuple[str, int]]
    newest: str
    replicated: dict[FormKey, str]
    token: str


class Peering:
    """Peers of one session: one replicator for each group of ranks that save together."""

    def __init__(
        self, config: TieredCheckpointConfig, counts: Counter[str], clock: Clock, serve: Callable[[], Endpoint | None]
    ) -> None:
        """Does nothing yet.

        Args:
            config: The configuration.
            counts: Counts of ``replicated`` and ``unreplicated`` parts.
            clock: The session's.
            serve: Has this node's drain serve its memory.
        """
        self._serve = serve
        self._config = config
        self._counts = counts
        self._clock = clock
        self._pid = os.getpid()
        #: Replicators by the ranks that save together, and the start of the job.
        self._replicators: dict[object, Replicator] = {}
        self._interface_in_use: Interface | None = None
        #: Replicator that sends the present saves.
        self._current: Replicator | None = None

    def meet(
        self, open_tier: Callable[[], MemoryTier], logger: Logger, process_group: Any, series: str | None = None
    ) -> None:
        """Has the ranks agree on their peers, once, and starts replication; all call this, on the threads that train.

        Does nothing if ``replication_factor`` is 1, or these ranks have met before.

        Args:
            open_tier: Opens this node's memory.
            logger: Logger to use.
            process_group: The ranks that save together; all of them if it is None.
            series: Series of the save that has them meet, see :attr:`Part.series`. If others may save side by side,
                parts of an earlier start that are of another series are theirs; None if that is not known.

        Raises:
            ConfigError: There are fewer machines than copies, or some rank did not come; on all ranks.
            MemoryTierError: Some rank can't use its memory tier; on all ranks.
        """
        import torch.distributed as dist

        if self._config.replication_factor == 1:
            return
        if not (dist.is_available() and dist.is_initialized()):
            self._peers_of(["here"])
        store = dist.distributed_c10d._get_default_store()
        key = store, tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        if key not in self._replicators:
            self._replicators[key] = self._meet(open_tier, logger, process_group, store, series)
            if len(self._replicators) == 1:
                # Threads that call into torch must have ended before the interpreter does.
                atexit.register(self.close, self._clock.timing.replication_release_s)
        self._current = self._replicators[key]

    def _meet(
        self,
        open_tier: Callable[[], MemoryTier],
        logger: Logger,
        process_group: Any,
        store: Any,
        series: str | None,
    ) -> Replicator:
        import torch.distributed as dist

        if not trains_here():
            raise ConfigError(
                "replication was set up from a thread",
                operation="replicate",
                hint="make the first save, or session.meet_peers(), on the thread that trains, on every rank",
            )
        tier, error = None, None
        try:
            tier = open_tier()
            self._say_interface(store, logger)
            self._serve()
        except Exception as caught:
            # The other ranks wait in the first exchange: they get the error there.
            error = caught
        node = node_of(tier.root if tier is not None else Path("/"))
        group: Group
        if process_group is None or dist.get_world_size(process_group) == dist.get_world_size():
            timeout_s = float(self._config.support.wait_timeout_s)
            group = TorchGroup(node, self._clock, timeout_s=timeout_s, what="the set-up of replication")
            # All parts are of these ranks, in any series.
            series = None
        else:
            group = GivenGroup(node, process_group)
        try:
            with group.failing_together():
                agree(group, error)
                assert tier is not None
                parts, replicas = (_of_group(each.parts(), series) for each in (tier, tier.replicas))
                own = [each for each in parts if each.part.rank == group.rank]
                gathered: list[_Member] = group.all_gather(
                    _Member(
                        machine(),
                        memory_of(tier.root),
                        {(each.save_id, each.part.rank) for each in replicas},
                        {(each.save_id, each.part.rank) for each in parts},
                        "".join(each.save_id for each in own[-1:]),
                        newest_replicated([*parts, *replicas]),
                        self._clock.token(8),
                    )
                )
                peers = self._peers_of([each.machine for each in gathered])
        finally:
            group.close()
        # A machine may not have learnt of replicated saves before all ended.
        replicated = newest_of(known for each in gathered for known in each.replicated.items())
        member = self._member(tier, store, gathered[0].token, group.rank, logger)
        made, newest = Replicator(member, peers, self._counts, replicated), [each.newest for each in gathered]
        for stored in own:
            key, is_newest = (stored.save_id, group.rank), stored is own[-1]
            was_replicated = stored.save_id in replicated.values()
            # If all have their part of the newest, it may become replicated now.
            counts = is_newest and not was_replicated and newest.count(stored.save_id) == stored.part.content.parts
            lacks = any(key not in gathered[peer].replicas for peer in peers[group.rank])
            if counts or (lacks and (is_newest or was_replicated)):
                made.offer(stored, again=not counts)
        for stored in self._of_others(tier, parts, gathered, group.rank):
            was_replicated = stored.save_id in replicated.values()
            is_newer = stored.save_id > replicated.get(form_key(stored.part), "")
            if was_replicated or (is_newer and newest.count(stored.save_id) < stored.part.content.parts):
                made.offer(stored, again=True)
        return made

    def _of_others(
        self, tier: MemoryTier, parts: Sequence[StoredPart], gathered: Sequence[_Member], rank: int
    ) -> list[StoredPart]:
        """Returns parts that this rank sends for ranks that are elsewhere now: too few nodes have them."""
        memories = [each.memory for each in gathered]
        found = []
        for stored in parts:
            part, key = stored.part.rank, (stored.save_id, stored.part.rank)
            copies = {each.machine for each in gathered if key in each.parts or key in each.replicas}
            is_own = memories[part : part + 1] == [memories[rank]]
            sends = not is_own and sender_of(part, memories[rank], memories) == rank
            if sends and stored.part.place == tier.place and len(copies) < self._config.replication_factor:
                found.append(stored)
        return found

    def _peers_of(self, machines: Sequence[str]) -> list[tuple[int, ...]]:
        return peers_of_ranks(machines, factor=self._config.replication_factor)

    def _say_interface(self, store: Any, logger: Logger) -> None:
        """Logs once the network interface that serves this node's memory."""
        chosen = interface_for(store)
        if chosen is not None and chosen != self._interface_in_use:
            self._interface_in_use = chosen
            speed = rate_text(megabits_of(chosen.name))
            logger.info("replicas travel over %s%s", chosen, f", {speed}" if speed else "")

    def _member(
        self,
        tier: MemoryTier,
        store: Any,
        group: str,
        rank: int,
        logger: Logger,
    ) -> Member:
        client = StoreClient(store, f"tiered-peers/{group}", timeout_s=self._clock.timing.store_answer_s)
        return Member(tier, client, rank, self._config, logger, self._clock, self._serve)

    def committed(self, stored: StoredPart, logger: Logger) -> None:
        """Takes each part that is saved on this node by this process."""
        if self._config.replication_factor == 1:
            return
        if self._current is not None:
            self._current.offer(stored)
            return
        self._counts["unreplicated"] += 1
        logger.warning(
            "%s%s was not replicated, only this node has it: meet_peers() was not called on the main threads",
            of_step(stored.part.content.step),
            stored.part.name,
        )

    def awaited(self, urgent: bool) -> set[str]:
        """See :meth:`Replicator.awaited`."""
        return set().union(*(each.awaited(urgent) for each in list(self._replicators.values())))

    @property
    def pending(self) -> int:
        """Parts that are still on their way."""
        return sum(each.pending for each in self._replicators.values())

    def close(self, timeout_s: float) -> None:
        """Sends queued parts, within the bound, and ends; :meth:`meet` may be called again."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            # A forked child has none of the threads.
            return
        replicators, self._replicators, self._current = list(self._replicators.values()), {}, None
        for each in replicators:
            each.close(timeout_s)


def _of_group(held: Sequence[StoredPart], series: str | None) -> list[StoredPart]:
    """Returns the parts of the ranks that have saved a series, by their folder; all of them if it is None."""
    return [each for each in held if series is None or _group(each.part.series_key.series) == _group(series)]


def _group(series: str) -> str:
    # Groups without folders differ in the rest of the name.
    return ids.folder_of(series) or series
