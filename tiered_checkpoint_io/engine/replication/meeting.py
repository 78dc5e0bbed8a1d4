"""Meeting of ranks: they agree on the placement of replicas, once a process, before the first save.

*Placement.* Nodes form cliques, as NVRx has them: with a factor of 2, nodes 0 and 1 keep each other's parts, then 2 and
3. If the number of nodes does not allow cliques of equal size, the nodes form a ring: each keeps copies for as many
others as any other does.

*Network.* Without a choice, gloo listens on the address that this host's name resolves to. On many machines that is
127.0.1.1, or the slow one of several networks. So the interface is chosen here: the one that is configured, or that the
user's ``GLOO_SOCKET_IFNAME`` names, or the one by which this host reaches the host of the store of torch.distributed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.coordination import (
    RankGroup,
    machine,
    trains_here,
)
from tiered_checkpoint_io.engine.ranks.run import StoreClient
from tiered_checkpoint_io.engine.replication.replicator import (
    FormKey,
    Member,
    Replicator,
    form_key,
    newest_of,
    newest_replicated,
)
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger, of_step
from tiered_checkpoint_io.memory.node import memory_of
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.peer import Endpoint

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFREQ, _MAX_ADDRESSES, _IFF_UP = 40, 512, 1
#: Networks inside one host.
_INNER = ("docker", "br-", "veth")
#: An address for documentation that no host has (RFC 5737): the way to it is the default route.
_ANYWHERE = "192.0.2.1"


class Interface(NamedTuple):
    """An address of this host, and the interface that has it."""

    name: str
    address: str
    is_up: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def is_inner(self) -> bool:
        """True if the interface only reaches this host."""
        return ipaddress.ip_address(self.address).is_loopback or self.name.startswith(_INNER)


def choose(interfaces: Sequence[Interface], *, environment: str, host: str, source: str | None) -> Interface | None:
    """Chooses the interface to use; pure.

    Args:
        interfaces: Interfaces of this host.
        environment: The value of ``GLOO_SOCKET_IFNAME``.
        host: The host of the store of torch.distributed, as it was given; "" if the store has none.
        source: This host's address on the route to ``host``.

    Returns:
        None if there is nothing to choose from.

    Raises:
        ConfigError: This host has no interface of the given name, or the interface has no address.
    """
    # If there are several names, a link uses the first.
    if name := environment.partition(",")[0]:
        found = next((each for each in interfaces if each.name == name), None)
        if found is None:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME is {name!r}, but {socket.gethostname()} has no such interface with an address",
                operation="replicate",
                hint="use one of " + ", ".join(map(str, interfaces)),
            )
        return found
    route = next((each for each in interfaces if each.address == source), None)
    if route is not None and (not route.is_inner or _is_this_host(host)):
        return route
    # The name of the store's host may mean the host itself there: 127.0.1.1.
    outer = (each for each in interfaces if each.is_up and not each.is_inner)
    return next(outer, route)


def _is_this_host(host: str) -> bool:
    """Returns True if a host's name means the local host on every rank: then all ranks are on one host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def interface_for(store: Any) -> Interface | None:
    """Returns the interface for a job with this store of torch.distributed; see :func:`choose`."""
    return interface_towards(_host_of(store))


def address_here() -> str:
    """Returns the address at which the other nodes of this process' job reach this one."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    chosen = interface_for(store)
    return chosen.address if chosen is not None else _source_for(_host_of(store) or _ANYWHERE) or "127.0.0.1"


def interface_towards(host: str) -> Interface | None:
    """Returns the same in a job whose store is on this host; "" if that is not known."""
    interfaces: list[Interface] = []
    # If a sandbox does not say, gloo chooses; a name that was given is refused all the same.
    with contextlib.suppress(OSError):
        interfaces = interfaces_here()
    return choose(
        interfaces,
        environment=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        host=host,
        source=_source_for(host or _ANYWHERE),
    )


def _host_of(store: Any) -> str:
    """Returns the host of a TCPStore; "" of a store of another kind."""
    while not hasattr(store, "host") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _source_for(host: str) -> str | None:
    """Returns the address from which this host reaches another one, None without a way; sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def interfaces_here() -> list[Interface]:
    """Returns the addresses of this host's interfaces, without link-local ones; IPv4 first."""
    names = array.array("B", bytes(_IFREQ * _MAX_ADDRESSES))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iP", len(names), names.buffer_info()[0]))

        def is_up(name: str) -> bool:
            flags = fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("16s24x", name.encode()))
            return bool(struct.unpack_from("h", flags, 16)[0] & _IFF_UP)

        for start in range(0, struct.unpack_from("i", answer)[0], _IFREQ):
            entry = names[start : start + _IFREQ].tobytes()
            # An alias has a label after the name: eth0:1.
            name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]
            found.append(Interface(name, socket.inet_ntoa(entry[20:24]), is_up(name)))
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, _, _, scope, _, name = line.split()
                if scope != "20":
                    found.append(Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))), is_up(name)))
    return found


def megabits_of(name: str, root: Path = Path("/sys/class/net")) -> int:
    """Returns the rate of an interface as its driver has it, Mbit/s; 0 if it does not know."""
    with contextlib.suppress(OSError, ValueError):
        return max(0, int((root / name / "speed").read_text()))
    return 0


def rate_text(megabits: int) -> str:
    """Returns a rate, such as "25 Gbit/s"; "" if it is not known."""
    if not megabits:
        return ""
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"


def peers_of_ranks(nodes: Sequence[str], *, factor: int) -> list[tuple[int, ...]]:
    """Returns the ranks that keep copies of each rank's parts, by rank.

    A rank's copies go to ``factor - 1`` other nodes, no two of them to the same one, and never to its own.
    The k-th rank of a node sends to the k-th rank of its peers, as far as they have so many.

    Args:
        nodes: The machine of each rank, by rank: its memory is lost as a whole, with that of all its containers.
        factor: Number of nodes for each part, the rank's own included.

    Raises:
        ConfigError: There are fewer machines than copies, so that two copies would be on the same one.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    if len(ranks) < factor:
        raise ConfigError(
            f"replication_factor is {factor}, but the {len(nodes)} ranks are on {len(ranks)} machine(s): copies on the"
            " same machine would be lost with it",
            operation="replicate",
            hint=f"use {factor} machines or more (containers on one count as one), or lower replication_factor",
        )
    order = list(ranks)
    peers: list[tuple[int, ...]] = [()] * len(nodes)
    for own, others in zip(order, node_peers(len(order), factor=factor), strict=True):
        for position, rank in enumerate(ranks[own]):
            there = (ranks[order[other]] for other in others)
            peers[rank] = tuple(each[position % len(each)] for each in there)
    return peers


def sender_of(part: int, node: str, nodes: Sequence[str]) -> int:
    """Returns the rank that sends its peers a part which a node holds: the part's own rank, if it runs there. If ranks
    have moved to other nodes, or are fewer than before, the node's ranks share the remaining parts.

    Args:
        part: The part's number.
        node: The memory of some rank.
        nodes: The memory of each rank, by rank.
    """
    here = [rank for rank, each in enumerate(nodes) if each == node]
    return part if part in here else here[part % len(here)]


def node_peers(count: int, *, factor: int) -> list[tuple[int, ...]]:
    """Returns the nodes that keep copies for each of ``count`` nodes; each node keeps ``factor - 1``.

    Args:
        count: Number of nodes; ``factor`` or more.
        factor: See :func:`peers_of_ranks`.
    """
    if count % factor == 0:
        # Each begins with the next of its clique, so that no member is the first choice of all others.
        return [tuple(node - node % factor + (node + k) % factor for k in range(1, factor)) for node in range(count)]
    # The same distances from every node make the load even.
    return [tuple((node + k) % count for k in range(1, factor)) for node in range(count)]


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
        if process_group is None or dist.get_world_size(process_group) == dist.get_world_size():
            # All parts are of these ranks, in any series.
            process_group = series = None
        group = RankGroup(process_group, self._clock)
        group.arrive(what="the set-up of replication")

        tier: MemoryTier | None = None
        parts: list[StoredPart] = []

        def report() -> _Member:
            nonlocal tier, parts
            tier = open_tier()
            self._say_interface(store, logger)
            self._serve()
            parts, replicas = (_of_group(each.parts(), series) for each in (tier, tier.replicas))
            own = [each for each in parts if each.part.rank == group.rank]
            return _Member(
                machine(),
                memory_of(tier.root),
                {(each.save_id, each.part.rank) for each in replicas},
                {(each.save_id, each.part.rank) for each in parts},
                "".join(each.save_id for each in own[-1:]),
                newest_replicated([*parts, *replicas]),
                self._clock.token(8),
            )

        gathered = group.all_gather(report)
        assert tier is not None
        own = [each for each in parts if each.part.rank == group.rank]
        peers = self._peers_of([each.machine for each in gathered])
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
