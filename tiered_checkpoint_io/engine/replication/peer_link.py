"""How two ranks get together to move a part between them: a request that one makes, and a link of the two.

A request is a key in the key-value store of torch.distributed, in which the other rank looks a few times a second, and
every two seconds where it has found none for long. It is withdrawn where the other rank does not take it in time;
exactly one of the two happens. What is lost on its way, or a rank that dies half-way, leaves no gap: the next request
replaces it.

A link is a gloo connection of two ranks, in one direction. A group of all ranks would not do: gloo closes *every* pair
of a group whose timeout passes on any of them, so one stalled peer would end replication on all its fellows for good. A
link takes a few milliseconds to make and fails alone; the next one finds a peer that has woken up again. Making it is
no collective, and concerns these two ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import distributed_c10d

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.store_client import PeerError, StoreClient
from tiered_checkpoint_io.engine.ranks.views import tensor_of
from tiered_checkpoint_io.engine.replication.network import Interface
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: What a peer answers that needs no replica.
HAVE = "have it already"
_TAKEN = "taken"
_WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Member:
    """This rank, in a group whose ranks send each other parts.

    Attributes:
        tier: This node's memory.
        store: What all ranks of the group share.
        rank: This one.
        world_size: How many there are.
        config: For bounds.
        log: Where to log.
        clock: The session's.
        interface: What links listen on; where it is None, gloo chooses.
    """

    tier: MemoryTier
    store: StoreClient
    rank: int
    world_size: int
    config: TieredCheckpointConfig
    log: Logger
    clock: Clock
    interface: Interface | None = None

    @property
    def timeout_s(self) -> float:
        """Bound of one part's way, seconds."""
        return float(self.config.support.wait_timeout_s)

    @property
    def message_s(self) -> float:
        """Bound of one message, seconds."""
        return min(self.timeout_s, self.clock.timing.message_s)


def request(
    member: Member, key: str, text: str, *, bound_s: float, poll_s: float, has_left: Callable[[], bool] = lambda: False
) -> None:
    """Asks another rank for a transfer, and waits until it is ready for it.

    Args:
        member: This rank.
        key: Where the other one looks.
        text: What it is to know.
        bound_s: Of the wait, seconds.
        poll_s: How often to look, seconds.
        has_left: Whether the other one takes no requests any more.

    Raises:
        PeerError: It did not take the request in time, or has left, or the store can't be asked.
    """
    store, clock = member.store, member.clock
    store.set(key, text)
    deadline = clock.monotonic() + bound_s
    while store.get(key) != _TAKEN:
        problem = "the peer has ended" if has_left() else ""
        if clock.monotonic() > deadline:
            problem = f"the peer did not answer within {bound_s:.0f} s"
        if problem and store.swap(key, text, _WITHDRAWN) != _TAKEN:
            raise PeerError(problem, operation="replicate")
        clock.sleep(poll_s)


def take_request(store: StoreClient, key: str) -> str | None:
    """What another rank asks for, which from now on counts on this one; None where it does not, or no longer."""
    text = store.get(key)
    if text in (None, _TAKEN, _WITHDRAWN) or store.swap(key, text, _TAKEN) != _TAKEN:
        return None
    return text


class Link:
    """A connection of two ranks, for parts in one direction; its methods raise ``PeerError``.

    Attributes:
        key: Which link.
        name: The other rank.
    """

    def __init__(self, member: Member, key: str, peer: int, *, sends: bool) -> None:
        """Opens it; both ranks have to, by the same key and within the bound of a message."""
        self.key = key
        self.name = f"rank {peer}"
        self._other = 1 if sends else 0
        self._group: Any = None
        meeting = distributed_c10d.PrefixStore(f"link/{key}", member.store.connect())
        bound = timedelta(seconds=member.message_s)
        made = partial(distributed_c10d.ProcessGroupGloo, meeting, 1 - self._other, 2)
        self._group = self._do(lambda: made(options_of(member.interface, bound) if member.interface else bound))

    def send(self, data: memoryview) -> None:
        """Sends bytes straight from where they lie."""
        self._do(lambda: self._group.send([tensor_of(data)], self._other, 0).wait())

    def receive(self, data: memoryview) -> None:
        """Fills ``data``."""
        self._do(lambda: self._group.recv([tensor_of(data)], self._other, 0).wait())

    def close(self) -> None:
        """Ends it."""
        self._group = None

    def _do(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            # The first line tells; what follows are frames of C++.
            raise PeerError(
                f"lost the peer: {str(error).partition(chr(10))[0]}", operation="replicate", key=self.key
            ) from error


def options_of(interface: Interface, bound: timedelta) -> Any:
    """How gloo makes a connection over this interface."""
    gloo: Any = distributed_c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=interface.address)]
    options._timeout = bound
    return options


class Links:
    """This rank's links in one direction, one for each peer, kept until a transfer fails."""

    def __init__(self, member: Member, *, sends: bool) -> None:
        self._member = member
        self._sends = sends
        self._open: dict[int, Link] = {}

    def open(self, peer: int, key: str) -> Link:
        """The link of this key, made where another one is open, or none."""
        link = self._open.get(peer)
        if link is None or link.key != key:
            self.close(peer)
            link = self._open[peer] = Link(self._member, key, peer, sends=self._sends)
        return link

    def close(self, peer: int) -> None:
        """Ends the link to a peer, if there is one."""
        link = self._open.pop(peer, None)
        if link is not None:
            link.close()

    def close_all(self) -> None:
        """Ends all links."""
        for peer in list(self._open):
            self.close(peer)
