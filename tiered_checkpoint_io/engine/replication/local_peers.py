"""What ranks have for each other when they load local checkpoints: no collective, and waits with bounds.

A node that has lost its memory can't load from it, but a peer keeps replicas of its parts. Ranks that load write to the
key-value store of torch.distributed what their node's memory holds: by shard, so that a rank which lacks one finds its
holders by few requests, and in counts. It asks one of these; a thread of that one answers, and sends the part over a
link of the two. No other rank takes part. The waits are bounded:

- for ranks that have not begun to load, until all have, or ``local_patience_s`` is over;
- where the node holds nothing of the newest save that all nodes together hold, since it has lost its memory or was not
  part of the job when that was made: for another rank's choice of what to load, while some rank may still choose.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial

from tiered_checkpoint_io.engine.ranks.store_client import PeerError
from tiered_checkpoint_io.engine.ranks.transfer import (
    SlotDestination,
    find_part,
    receive_description,
    receive_part,
    send_description,
    send_held_part,
    send_status,
    text_of,
)
from tiered_checkpoint_io.engine.replication.peer_link import Link, Member, request, take_request
from tiered_checkpoint_io.engine.staging.loaded import slot_for
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.memory.parts import StoredPart


class LocalPeers:
    """One rank's end of it, for the life of a session."""

    def __init__(self, member: Member) -> None:
        """Takes what does not change; its thread begins with the first load."""
        self._member = member
        self._tier = member.tier
        self._store = member.store
        self._clock = member.clock
        self._timing = member.clock.timing
        self._rank = member.rank
        self._world = member.world_size
        self._log = member.log
        self._timeout_s = member.timeout_s
        self._changed = threading.Condition()
        self._load = ""
        #: Whether this rank may choose what all load, since its node's memory holds something.
        self._may_choose = False
        #: When this rank last had something to give.
        self._idle_since = 0.0
        #: Requests to this rank that are done with, and how many there were when it last counted them.
        self._served = self._counted = 0
        self._counts_at = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------------------------- of a load
    def begin(self, load: str, held: Mapping[tuple[str, int], int]) -> None:
        """Tells what this node's memory holds; from now on, others may ask for it.

        ``held`` are save ids and shards, with how many shards make each save.
        """
        for (save_id, shard), shards in held.items():
            # A few requests of each rank, where asking for what each has would be as many as there are ranks, of each.
            key = f"{load}/shard/{save_id}/{shard}"
            number = self._store.add(key)
            self._store.set(f"{key}/{number}", str(self._rank))
            if number == 1 and self._store.add(f"{load}/shards/{save_id}") == shards:
                newest = ""
                while newest < save_id:
                    newest = self._store.swap(f"{load}/newest", newest, save_id)
        self._may_choose = bool(held)
        if self._may_choose:
            self._store.add(f"{load}/choosing")
        # Last: once all have begun, what is said above is all there is.
        self._store.add(f"{load}/began")
        with self._changed:
            self._load, self._idle_since = load, self._clock.monotonic()
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._thread = self._clock.start(self._serve, "tiered-give-replicas")

    def newest(self, load: str, chosen: Callable[[], str | None]) -> str | None:
        """The newest save of which the memory of all nodes together has every shard.

        Waits until all ranks have begun the load, or one has chosen, for ``local_patience_s`` at most.
        """
        began = self._clock.monotonic()
        while not self._all_began(load) and chosen() is None:
            if self._is_late(began):
                break
            self._pause(began)
        return self._store.get(f"{load}/newest")

    def end(self, load: str) -> None:
        """Tells that this rank's load is over, however it ended."""
        if self._may_choose:
            self._store.add(f"{load}/choosing", -1)
        self._store.add(f"{load}/over")

    def await_choice(self, load: str, chosen: Callable[[], str | None]) -> str | None:
        """What another rank has chosen to load, waiting for it where one may still choose."""
        began = self._clock.monotonic()
        while not self._is_late(began):
            found = chosen()
            if found is not None:
                return found
            if self._all_began(load) and self._store.add(f"{load}/choosing", 0) <= 0:
                # One that is over by now may have chosen since we looked.
                break
            self._pause(began)
        return chosen()

    def fetch(self, load: str, save_id: str, shard: int) -> tuple[StoredPart | None, list[str]]:
        """Has a part sent from another node's memory to this one's, verified, and made this node's own.

        Returns:
            The part, or None; and what was tried without success.
        """
        began, tried = self._clock.monotonic(), set[int]()
        notes: list[str] = []
        while True:
            # Before the holders: those that have begun by now are among them.
            all_began = self._all_began(load)
            for rank in self._holders(load, save_id, shard, tried):
                tried.add(rank)
                try:
                    return self._get(rank, save_id, shard), notes
                except Exception as error:
                    notes.append(f"shard {shard}: peer (rank {rank}): {text_of(error)}")
                    self._log.error("skipping this copy, trying the next: %s", notes[-1])
            if all_began or self._is_late(began):
                return None, notes
            self._pause(began)

    def close(self) -> None:
        """Ends the thread, once no rank loads any more, or after a few seconds."""
        if self._thread is not None:
            began = self._clock.monotonic()
            deadline = began + self._timing.local_linger_s
            with contextlib.suppress(PeerError):
                while self._clock.monotonic() < deadline and self._thread.is_alive() and not self._all_over(self._load):
                    self._pause(began)
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._clock.join(self._thread, self._timing.message_s)
        self._store.close()

    def _holders(self, load: str, save_id: str, shard: int, tried: Collection[int]) -> list[int]:
        """The ranks to ask for a shard, in turn: those whose node's memory holds it, and that were not asked.

        A rank gives one part at a time. So the ranks of a node that has lost its memory, whose parts have the same
        holders, each begin with another one, as far as there are so many.
        """
        key = f"{load}/shard/{save_id}/{shard}"
        told = [self._store.get(f"{key}/{number}") for number in range(1, self._store.add(key, 0) + 1)]
        found = sorted({int(each) for each in told if each is not None}.difference(tried))
        first = (self._store.add(f"{load}/asking/{found[0]}") - 1) % len(found) if found else 0
        return found[first:] + found[:first]

    def _is_late(self, began: float) -> bool:
        return self._clock.monotonic() - began > min(self._timeout_s, self._timing.local_patience_s)

    def _pause(self, began: float) -> None:
        self._clock.sleep(self._timing.pause_s(self._timing.local_poll_s, self._clock.monotonic() - began))

    def _all_began(self, load: str) -> bool:
        return self._store.add(f"{load}/began", 0) >= self._world

    def _all_over(self, load: str) -> bool:
        return self._store.add(f"{load}/over", 0) >= self._world

    # ------------------------------------------------------------------------------------- asking
    def _get(self, source: int, save_id: str, shard: int) -> StoredPart:
        started = self._clock.monotonic()
        key = f"ask/{source}/{self._store.add(f'asked/{source}')}"
        bound_s, poll_s = min(self._timeout_s, self._timing.local_taken_s), self._timing.local_poll_s / 4
        text = json.dumps([self._rank, save_id, shard])
        request(self._member, key, text, bound_s=bound_s, poll_s=poll_s)
        with contextlib.closing(Link(self._member, key, source, sends=False)) as link:
            part = receive_description(link)
            stored = receive_part(
                link, part, SlotDestination(self._tier, part, acquire=partial(slot_for, self._tier, part))
            )
        self._log.info(
            "Step %d: shard %d of %s is back from rank %d: %s",
            part.content.step,
            shard,
            part.name,
            source,
            rate(part.content.size, self._clock.monotonic() - started),
        )
        return stored

    # ------------------------------------------------------------------------------------- giving
    def _serve(self) -> None:
        missed = 0
        while not self._is_closing:
            try:
                if not self._serve_one():
                    self._rest()
                if missed > 1:
                    self._log.info("ranks can ask for replicas again")
                missed = 0
            except PeerError as error:
                # One late answer is no news. At the end of a job, the store ends with the rank that holds it.
                missed += 1
                if missed == 2 and not self._is_closing:
                    self._log.warning("ranks can't ask for replicas for now: %s", error)
                with self._changed:
                    if not self._is_closing:
                        self._clock.wait(self._changed, self._timing.offer_retry_s)

    def _serve_one(self) -> bool:
        """Serves the next request; False where there is none."""
        key = f"ask/{self._rank}/{self._served + 1}"
        if self._store.get(key) is None:
            return self._passes_gap()
        text = take_request(self._store, key)
        # After that: it is looked at anew where the store has not answered.
        self._served += 1
        if text is not None:
            self._give(key, *json.loads(text))
        self._idle_since = self._clock.monotonic()
        return True

    def _passes_gap(self) -> bool:
        """Passes over a request that was counted long ago and never made, since its rank has died; whether it did."""
        now = self._clock.monotonic()
        if now < self._counts_at:
            return False
        earlier, self._counted = self._counted, self._store.add(f"asked/{self._rank}", 0)
        self._counts_at = now + self._timing.local_taken_s
        if self._served >= earlier:
            return False
        self._served += 1
        return True

    def _rest(self) -> None:
        load = self._load
        all_over = self._all_over(load)
        with self._changed:
            if all_over and load == self._load and not self._is_closing:
                # While all train, no rank asks.
                self._changed.wait()
            elif not self._is_closing:
                idle_s = self._clock.monotonic() - self._idle_since
                self._clock.wait(self._changed, self._timing.pause_s(self._timing.local_poll_s, idle_s))

    def _give(self, key: str, target: int, save_id: str, shard: int) -> None:
        """Sends one part; its failure concerns the rank that asked, and is only noted here."""
        deadline = self._clock.monotonic() + self._timeout_s
        try:
            with contextlib.closing(Link(self._member, key, target, sends=True)) as link:
                try:
                    part = find_part(self._tier, save_id, shard).part
                except Exception as error:
                    send_status(link, text_of(error))
                    return
                send_description(link, part)
                problem = send_held_part(link, self._tier, part, lambda: self._clock.monotonic() > deadline)
            if problem:
                self._log.error("shard %s of %s was not received: %s", shard, part.name, problem)
        except Exception as error:
            self._log.warning("shard %d of save %s was asked for, but not sent: %s", shard, save_id, text_of(error))
