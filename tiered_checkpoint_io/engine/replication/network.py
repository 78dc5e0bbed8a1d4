"""Choice of the network interface for replicas.

Without a choice, gloo listens on the address that this host's name resolves to. On many machines that is 127.0.1.1, or
the slow one of several networks. So the interface is chosen here: the one that is configured, or that the user's
``GLOO_SOCKET_IFNAME`` names, or the one by which this host reaches the host of the store of torch.distributed.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiered_checkpoint_io.errors import ConfigError

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
