"""Memory of other nodes for local checkpoints: no collective, and waits with bounds.

A node that has lost its memory can't load from it, but a peer keeps replicas of its parts. Ranks that load write to the
key-value store of torch.distributed the content and the endpoint of their node's memory: by shard, so that a rank
that lacks one finds its holders by few requests, and in counts. The waits are bounded:

- for ranks that have not begun to load, until all have, or ``local_patience_s`` is over;
- if the node holds nothing of the newest save that all nodes together hold, since it has lost its memory or was not
  part of the job at that save: for another rank's choice of a save, while some rank may still choose.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial

from tiered_checkpoint_io.engine.ranks.store_client import PeerError
from tiered_checkpoint_io.engine.replication.replicator import Member
from tiered_checkpoint_io.engine.staging.arriving import SlotDestination, describe, read_part
from tiered_checkpoint_io.engine.staging.loaded import slot_for
from tiered_checkpoint_io.logs import of_step, rate
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.stores.peer import Endpoint, PeerStore


class LocalPeers:
    """One rank's end of the exchange, for the life of a session."""

    def __init__(self, member: Member) -> None:
        """Takes the parts of the exchange that do not change."""
        self._member = member
        self._store, self._clock = member.store, member.clock
        self._timing = member.clock.timing
        self._load = ""
        #: True if this rank may choose the save that all load, since its node's memory holds parts.
        self._may_choose = False

    def begin(self, load: str, held: Mapping[tuple[str, int], int]) -> None:
        """Publishes the content of this node's memory; from now on, other nodes may read it.

        ``held`` are save ids and shards, with how many shards make each save.
        """
        endpoint = json.dumps(self._member.serve() if held else None)
        for (save_id, shard), shards in held.items():
            # A few requests of each rank; to ask each other rank for its content would be as many as there are ranks.
            key = f"{load}/shard/{save_id}/{shard}"
            number = self._store.add(key)
            self._store.set(f"{key}/{number}", endpoint)
            if number == 1 and self._store.add(f"{load}/shards/{save_id}") == shards:
                newest = ""
                while newest < save_id:
                    newest = self._store.swap(f"{load}/newest", newest, save_id)
        self._may_choose, self._load = bool(held), load
        if self._may_choose:
            self._store.add(f"{load}/choosing")
        # Last: once all have begun, the list above is complete.
        self._store.add(f"{load}/began")

    def newest(self, load: str, chosen: Callable[[], str | None]) -> str | None:
        """Returns the newest save of which the memory of all nodes together has every shard.

        Waits until all ranks have begun the load, or one has chosen, for ``local_patience_s`` at most.
        """
        began = self._clock.monotonic()
        while not self._all_began(load) and chosen() is None:
            if self._is_late(began):
                break
            self._pause(began)
        return self._store.get(f"{load}/newest")

    def end(self, load: str) -> None:
        """Reports that this rank's load is over, for any reason."""
        if self._may_choose:
            self._store.add(f"{load}/choosing", -1)
        self._store.add(f"{load}/over")

    def await_choice(self, load: str, chosen: Callable[[], str | None]) -> str | None:
        """Returns another rank's choice of a save to load; waits for one while another rank may still choose."""
        began = self._clock.monotonic()
        while not self._is_late(began):
            found = chosen()
            if found is not None:
                return found
            if self._all_began(load) and self._store.add(f"{load}/choosing", 0) <= 0:
                # A rank whose load is over by now may have chosen since we looked.
                break
            self._pause(began)
        return chosen()

    def fetch(self, load: str, save_id: str, shard: int) -> tuple[StoredPart | None, list[str]]:
        """Reads a part from another node's memory into this one's, verified, and made this node's own.

        Returns:
            The part, or None; and the sources that were tried without success.
        """
        began, tried = self._clock.monotonic(), set[Endpoint]()
        notes: list[str] = []
        while True:
            # Before the holders: ranks that have begun by now are among them.
            all_began = self._all_began(load)
            for endpoint in self._holders(load, save_id, shard, tried):
                tried.add(endpoint)
                try:
                    return self._read(endpoint, save_id, shard), notes
                except Exception as error:
                    notes.append(f"shard {shard}: peer ({endpoint.address}): {error}")
                    self._member.log.error("skipping this copy, trying the next: %s", notes[-1])
            if all_began or self._is_late(began):
                return None, notes
            self._pause(began)

    def close(self) -> None:
        """Waits until no rank loads any more, for a few seconds: until then this node's memory is served."""
        began = self._clock.monotonic()
        with contextlib.suppress(PeerError):
            while self._may_choose and self._clock.monotonic() - began < self._timing.local_linger_s:
                if self._store.add(f"{self._load}/over", 0) >= self._member.world_size:
                    break
                self._pause(began)
        self._store.close()

    def _holders(self, load: str, save_id: str, shard: int, tried: Collection[Endpoint]) -> list[Endpoint]:
        """Returns the endpoints to read a shard from, in turn; ranks begin with different nodes."""
        key = f"{load}/shard/{save_id}/{shard}"
        told = [self._store.get(f"{key}/{number}") for number in range(1, self._store.add(key, 0) + 1)]
        found = sorted({Endpoint(*where) for each in told if each and (where := json.loads(each))}.difference(tried))
        first = self._member.rank % len(found) if found else 0
        return found[first:] + found[:first]

    def _read(self, endpoint: Endpoint, save_id: str, shard: int) -> StoredPart:
        started, tier = self._clock.monotonic(), self._member.tier
        with contextlib.closing(PeerStore(endpoint, clock=self._clock)) as store:
            part = describe(store, save_id, shard)
            stored = read_part(part, [store], SlotDestination(tier, part, acquire=partial(slot_for, tier, part)))
        speed = rate(part.content.size, self._clock.monotonic() - started)
        self._member.log.info(
            "%sshard %d of %s is back from %s: %s", of_step(part.content.step), shard, part.name, store.url, speed
        )
        return stored

    def _is_late(self, began: float) -> bool:
        return self._clock.monotonic() - began > min(self._member.timeout_s, self._timing.local_patience_s)

    def _pause(self, began: float) -> None:
        self._clock.sleep(self._timing.pause_s(self._timing.local_poll_s, self._clock.monotonic() - began))

    def _all_began(self, load: str) -> bool:
        return self._store.add(f"{load}/began", 0) >= self._member.world_size
