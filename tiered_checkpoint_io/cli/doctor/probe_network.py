"""Which interface replication between nodes would use, as gloo chooses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from tiered_checkpoint_io.cli.doctor.facts import NetworkFacts

_SIOCGIFADDR = 0x8915


def probe_network(peer: str | None, sys: Path = Path("/sys")) -> NetworkFacts:
    """Looks for the interface: named by ``GLOO_SOCKET_IFNAME``, on the way to ``peer``, or of this machine's name."""
    names = tuple(name for _, name in socket.if_nameindex())
    addresses = {name: _address(name) for name in names}
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if named:
        source, address = "GLOO_SOCKET_IFNAME", addresses.get(named, "")
        interface = named if named in names else ""
    else:
        source = f"the route to {peer}" if peer else f"this machine's name, {socket.gethostname()}"
        address = _address_towards(peer) if peer else _own_address()
        interface = next((name for name, each in addresses.items() if each and each == address), "")
        if address.startswith("127."):
            interface = "lo"
    speed = None
    with contextlib.suppress(OSError, ValueError):
        found = int((sys / "class/net" / interface / "speed").read_text()) if interface else -1
        speed = found if found > 0 else None
    return NetworkFacts(source, interface, address, speed, names)


def _address(interface: str) -> str:
    """The interface's IPv4 address; "" for none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query, contextlib.suppress(OSError):
        answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _address_towards(peer: str) -> str:
    """The address of ours that packets to a peer leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query, contextlib.suppress(OSError):
        query.connect((peer, 9))
        return str(query.getsockname()[0])
    return ""


def _own_address() -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""
