"""How two ranks move a part between them: a board of offers that all ranks see, and a link for each transfer.

The board is the key-value store of torch.distributed, over a connection of its own. A rank looks there for what
is offered to it a few times a second; each pair of ranks has a place of its own for it, where a new offer replaces
the one before, so that what is lost on its way, or whoever dies half-way, leaves no gap. A question that is not
answered in time ends the connection; the next one is asked over another.

A link is a gloo connection of two ranks, in one direction, kept until a transfer fails. A group of all ranks would
not do: gloo closes *every* pair of a group whose timeout passes on any of them, so one stalled peer would end
replication on all its fellows for good. A link takes a few milliseconds to make and fails alone; the next one finds
a peer that has woken up again. Making it is no collective, and concerns nobody but the two.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.store_client import StoreClient
from tiered_checkpoint_io.engine.ranks.views import at
from tiered_checkpoint_io.errors import PeerError

_UNREACHABLE = "the store of torch.distributed can't be asked"
#: What a peer answers that needs no copy.
HAVE = "have it already"
_WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Offer:
    """A part that a rank has for another one.

    Attributes:
        key: What tells it from any other of these ranks.
        source: Whose part it is.
        link: Over which link it comes: a number that grows with each new one of the two.
        size: Bytes of the part's description, which is sent first.
    """

    key: str
    source: int
    link: str
    size: int


class Board:
    """What the ranks of one group tell each other; each look is answered at once.

    Its methods raise ``PeerError`` where the store can't be asked: the rank that holds it has ended.
    """

    def __init__(self, store: Any, token: str, rank: int, clock: Clock) -> None:
        """Takes a store that all ranks of the group share.

        Args:
            store: Of torch.distributed.
            token: Tells this group of ranks from all others that used the same store.
            rank: This rank, in the group.
            clock: Of all that goes over this board.
        """
        self.clock = clock
        self._origin = store
        self._prefix = f"tiered-peers/{token}"
        self._rank = rank
        self._lock = threading.Lock()
        self._sent: Counter[int] = Counter()
        #: Of each source, what was taken last.
        self._taken: dict[int, str] = {}
        self._client: StoreClient | None = None
        self._ask(lambda _: None)

    def offer(self, target: int, link: int, size: int) -> Offer:
        """Offers a rank a part whose description has so many bytes, over a link of this number."""
        self._sent[target] += 1
        offer = Offer(f"{self._rank}/{target}/{self._sent[target]}", self._rank, f"{self._rank}/{target}/{link}", size)
        told = json.dumps([offer.key, offer.source, offer.link, offer.size])
        self._set(f"offer/{self._rank}/{target}", told)
        return offer

    def withdraw(self, target: int) -> None:
        """Tells a rank that has not looked yet that what it was offered is so no longer."""
        self._set(f"offer/{self._rank}/{target}", _WITHDRAWN)

    def next_offer(self, source: int) -> Offer | None:
        """What a rank offers to this one next; None where there is nothing new."""
        told = self._get(f"offer/{source}/{self._rank}")
        if told is None or told in (_WITHDRAWN, self._taken.get(source)):
            return None
        self._taken[source] = told
        return Offer(*json.loads(told))

    def accept(self, offer: Offer) -> None:
        """Tells its source that this rank is ready for it."""
        self._set(f"accepted/{offer.key}", "")

    def is_accepted(self, offer: Offer) -> bool:
        """Whether the target is ready; to be asked until it is."""
        accepted = self._get(f"accepted/{offer.key}") is not None
        if accepted:
            self._forget(f"accepted/{offer.key}")
        return accepted

    @property
    def store(self) -> Any:
        """The store, as the last question found it."""
        client = self._client
        if client is None:
            raise PeerError(_UNREACHABLE, operation="replicate", rank=self._rank)
        return client.store

    def copied(self, save_id: str, parts: int) -> None:
        """Notes that one part of a save, which has so many, is on all peers that are to keep it."""
        if self._ask(lambda store: store.add(f"copied/{save_id}", 1)) >= parts:
            self._set(f"whole/{save_id}", "")

    def is_whole(self, save_id: str) -> bool:
        """Whether all parts of a save are on their peers."""
        return self._get(f"whole/{save_id}") is not None

    def ends(self) -> None:
        """Tells that this rank offers nothing more."""
        self._set(f"ended/{self._rank}", "")

    def has_ended(self, rank: int) -> bool:
        """Whether a rank offers nothing more."""
        return self._get(f"ended/{rank}") is not None

    def leaves(self) -> None:
        """Tells that this rank takes nothing more."""
        self._set(f"left/{self._rank}", "")

    def has_left(self, rank: int) -> bool:
        """Whether a rank takes nothing more."""
        return self._get(f"left/{rank}") is not None

    def note(self, key: str, value: str) -> None:
        """Leaves a word."""
        self._set(f"note/{key}", value)

    def noted(self, key: str) -> str | None:
        """The word that somebody left; None where nobody has."""
        return self._get(f"note/{key}")

    def add(self, key: str, count: int = 1) -> int:
        """Counts, for all ranks together; how many there are by now."""
        total: int = self._ask(lambda store: store.add(f"count/{key}", count))
        return total

    def _get(self, key: str) -> str | None:
        told: bytes | None = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return told.decode() if told is not None else None

    def _forget(self, key: str) -> None:
        # A job makes many saves, and the store lives as long as the job.
        self._ask(lambda store: store.delete_key(key))

    def _set(self, key: str, value: str) -> None:
        # An empty value would look like none.
        self._ask(lambda store: store.set(key, value or "-"))

    def close(self) -> None:
        """Ends the connection."""
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        with self._lock:
            try:
                if self._client is None:
                    self._client = StoreClient(self._origin, self._prefix, timeout_s=self.clock.timing.store_answer_s)
                return self._client.call(question)
            except Exception as error:
                # The answer may still come, and would be taken for that of the next question.
                if self._client is not None:
                    self._client.drop()
                self._client = None
                raise PeerError(
                    f"{_UNREACHABLE}: {str(error).partition(chr(10))[0]}",
                    operation="replicate",
                    rank=self._rank,
                    hint="the rank that holds it has ended, or its host can't be reached",
                ) from error


class Link:
    """A connection of two ranks, for parts in one direction; its methods raise ``PeerError``.

    Attributes:
        key: Which link.
        name: Whose parts it is for.
    """

    def __init__(self, board: Board, offer: Offer, *, sends: bool, timeout_s: float) -> None:
        """Opens it; both ranks have to, within the bound.

        Args:
            board: Where the two find each other.
            offer: What is to travel first.
            sends: Whether this rank is the offer's source.
            timeout_s: Bound of this, and of each message, seconds.
        """
        self._other = 1 if sends else 0
        self.key = offer.link
        self.name = f"rank {offer.source}"
        self._group: Any = None
        store = distributed_c10d.PrefixStore(f"link/{offer.link}", board.store)
        bound = timedelta(seconds=timeout_s)
        self._group = self._do(lambda: distributed_c10d.ProcessGroupGloo(store, 1 - self._other, 2, bound))

    def send(self, data: memoryview) -> None:
        """Sends bytes straight from where they lie."""
        tensor = torch.frombuffer(at(data, 0, len(data)), dtype=torch.uint8)
        self._do(lambda: self._group.send([tensor], self._other, 0).wait())

    def receive(self, data: memoryview) -> None:
        """Fills ``data``."""
        tensor = torch.frombuffer(at(data, 0, len(data)), dtype=torch.uint8)
        self._do(lambda: self._group.recv([tensor], self._other, 0).wait())

    def close(self) -> None:
        """Ends it."""
        self._group = None

    def _do(self, work: Any) -> Any:
        try:
            return work()
        except Exception as error:
            # The first line tells; what follows are frames of C++.
            raise PeerError(
                f"lost the peer: {str(error).partition(chr(10))[0]}", operation="replicate", key=self.key
            ) from error
