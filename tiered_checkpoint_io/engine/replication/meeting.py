"""Meeting of ranks: once a process, before the first save, they note for their drains which nodes replicate together.

*Network.* The drain listens on one address: that of the interface that the user's ``GLOO_SOCKET_IFNAME`` names, or by
which this host reaches the host of the store of torch.distributed. The name of this host is not asked: on many machines
it means 127.0.1.1, or the slow one of several networks.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.coordination import RankGroup, machine, trains_here
from tiered_checkpoint_io.engine.replication.agreement import Group, Node, check_machines
from tiered_checkpoint_io.engine.replication.replicas import form_key, given_up, join
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger, of_step
from tiered_checkpoint_io.memory.node import memory_of
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.peer import Endpoint

_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 1
#: Networks inside one host.
_INNER = ("docker", "br-", "veth")
#: An address for documentation that no host has (RFC 5737): the way to it is the default route.
_ANYWHERE = "192.0.2.1"


def address_here() -> str:
    """Returns the address at which the other nodes of this process' job reach this one.

    Raises ConfigError if no interface of this host that is up has the name in ``GLOO_SOCKET_IFNAME``.
    """
    import torch.distributed as dist

    addresses = dict[str, str]()
    # A sandbox may not say.
    with contextlib.suppress(OSError):
        addresses = addresses_here()
    # If there are several names, a link uses the first.
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        if name not in addresses:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME is {name!r}, but {socket.gethostname()} has no such interface with an address",
                operation="replicate",
                hint="use one of " + ", ".join(f"{each} ({address})" for each, address in addresses.items()),
            )
        return addresses[name]
    host = _host_of(dist.distributed_c10d._get_default_store() if dist.is_initialized() else None)
    return choose(addresses, host, _source_for(host or _ANYWHERE))


def choose(addresses: Mapping[str, str], host: str, source: str | None) -> str:
    """Returns the address to use, of those that this host has by interface; pure.

    ``host`` is the host of the store of torch.distributed, "" if it has none. ``source`` is the address on the route
    to it.
    """
    inner = {each for name, each in addresses.items() if name.startswith(_INNER) or _is_loopback(each)}
    is_outer = source is not None and source not in inner and not _is_loopback(source)
    if not is_outer and not _is_loopback(host):
        # The name of the store's host may mean the host itself there: 127.0.1.1.
        source = next((each for each in addresses.values() if each not in inner), source)
    return source or "127.0.0.1"


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


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


def addresses_here() -> dict[str, str]:
    """Returns an address of each interface of this host that is up: IPv4 if it has one, and none that is link-local."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(asked, request, struct.pack("40s", name.encode()))

        names = [name for _, name in socket.if_nameindex()]
        names = [name for name in names if struct.unpack_from("h", ask(_SIOCGIFFLAGS, name), 16)[0] & _IFF_UP]
        for name in names:
            # It may have no IPv4 address.
            with contextlib.suppress(OSError):
                found[name] = socket.inet_ntoa(ask(_SIOCGIFADDR, name)[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20" and name in names:
                found.setdefault(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


#: Number of saves that wait to be replicated; of more, the oldest may go.
_MAX_WAITING = 2


def awaited_in(tier: MemoryTier, urgent: bool) -> set[str]:
    """Returns the saves of which no part may be removed, because they are replicated, or may become so.

    If room is urgently needed, only the newest of the saves that are not being replicated yet waits.
    """
    own, safe = tier.parts(), dict[str, str]()
    for each in sorted((*own, *tier.replicas.parts()), key=lambda each: each.save_id):
        if each.replicated:
            safe[form_key(each.part)] = each.save_id
    fresh = sorted({each.save_id for each in own if each.save_id > safe.get(form_key(each.part), "")})
    waiting = fresh[-1:] if urgent else fresh[-_MAX_WAITING:]
    return {*safe.values(), *waiting, *(each.save_id for each in own if each.awaited)}


class Peering:
    """Replication, as the session of one rank sees it: its drain replicates, and marks the parts."""

    def __init__(
        self, config: TieredCheckpointConfig, counts: Counter[str], clock: Clock, serve: Callable[[], Endpoint | None]
    ) -> None:
        """Does nothing yet.

        Parts are counted in ``counts`` as ``replicated`` or ``unreplicated``; ``serve`` has this node's drain serve its
        memory.
        """
        self._serve, self._config, self._counts, self._clock = serve, config, counts, clock
        #: Groups of ranks that have met, each with the store of its job.
        self._met: list[object] = []
        self._tier: MemoryTier | None = None
        self._log: Logger | None = None
        self._lock = threading.Lock()
        #: Parts that this process has saved, and whose replication is not decided; each with the time of its save.
        self._waiting: list[tuple[StoredPart, float]] = []

    def meet(
        self, open_tier: Callable[[], MemoryTier], logger: Logger, process_group: Any, series: str | None = None
    ) -> None:
        """Agrees with the other ranks on the peers, once; all call this, on the threads that train.

        Does nothing if ``replication_factor`` is 1, or these ranks have met before. Without a ``process_group``, all
        ranks save together. ``series`` is that of the save that has them meet, see :attr:`Part.series`; None if it is
        not known. If others may save side by side, parts of an earlier start that are of another series are theirs.

        Raises:
            ConfigError: There are fewer machines than copies, or some rank did not come; on all ranks.
            MemoryTierError: Some rank can't use its memory tier; on all ranks.
        """
        import torch.distributed as dist

        if self._config.replication_factor == 1:
            return
        if not (dist.is_available() and dist.is_initialized()):
            check_machines([Node("here", "", "", 0, "")], self._config.replication_factor)
        store = dist.distributed_c10d._get_default_store()
        key = store, tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        if key in self._met:
            return
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

        def report() -> tuple[Node, str]:
            self._log, self._tier, endpoint = logger, open_tier(), self._serve()
            if endpoint is not None:
                logger.info("other nodes read replicas of this node's parts at %s", endpoint.address)
            return Node(machine(), memory_of(self._tier.root), *(endpoint or ("", 0, ""))), self._clock.token(8)

        gathered = group.all_gather(report)
        of_memory: dict[str, Node] = {}
        for node, _ in gathered:
            of_memory.setdefault(node.memory, node)
        nodes = tuple(of_memory.values())
        check_machines(nodes, self._config.replication_factor)
        assert self._tier is not None
        join(self._tier.root, Group(gathered[0][1], self._config.replication_factor, series, nodes))
        self._met.append(key)

    def committed(self, stored: StoredPart, logger: Logger) -> None:
        """Takes each part that is saved on this node by this process."""
        if self._config.replication_factor == 1:
            return
        if self._met:
            with self._lock:
                self._waiting.append((stored, self._clock.monotonic()))
            return
        self._warn(logger, stored, "meet_peers() was not called on the main threads")

    def look(self) -> None:
        """Counts the parts whose replication is decided by now, each once; a failure is logged."""
        tier, log = self._tier, self._log
        if tier is None or log is None or not self._waiting:
            return
        with self._lock:
            held = {(each.save_id, each.part.rank): each for each in tier.parts()}
            safe = {form_key(each.part): each.save_id for each in held.values() if each.replicated}
            reasons, left = given_up(tier.root), list[tuple[StoredPart, float]]()
            for stored, since in self._waiting:
                waited_s = self._clock.monotonic() - since
                part, now = stored.part, held.get((stored.save_id, stored.part.rank))
                if now is not None and now.replicated:
                    self._counts["replicated"] += 1
                    copies = self._config.replication_factor - 1
                    log.info("%sreplicated %s to %d peer(s)", of_step(part.content.step), part.name, copies)
                elif why := reasons.get(stored.save_id):
                    self._warn(log, stored, why)
                elif now is None or safe.get(form_key(part), "") > stored.save_id:
                    why = "replaced by newer saves: peers or network are too slow for this save interval"
                    self._warn(log, stored, why)
                elif waited_s > 2 * self._clock.timing.replica_patience_s:
                    self._warn(log, stored, f"nothing was decided within {waited_s:.0f} s: a drain does not answer")
                else:
                    left.append((stored, since))
            self._waiting = left

    def _warn(self, log: Logger, stored: StoredPart, why: str) -> None:
        self._counts["unreplicated"] += 1
        step, rank, name = of_step(stored.part.content.step), stored.part.rank, stored.part.name
        log.warning("%srank %d's part of %s was not replicated, only this node has it: %s", step, rank, name, why)

    @property
    def pending(self) -> int:
        """Parts that are still on their way."""
        self.look()
        return len(self._waiting)

    def close(self, timeout_s: float) -> None:
        """Waits until the drains have replicated what was saved, within the bound; they continue in any case."""
        deadline = self._clock.monotonic() + min(timeout_s, self._clock.timing.replica_patience_s)
        while self.pending and self._clock.monotonic() < deadline:
            self._clock.sleep(self._clock.timing.wait_poll_s)
        self._met.clear()
