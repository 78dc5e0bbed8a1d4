"""What ranks have for each other when they load local checkpoints: no collective, and no wait but for what is lost.

A node that has lost its memory can't load from it, but a peer keeps copies of its parts. Ranks that load leave word
on a board (the key-value store of torch.distributed) of what their node's memory holds. A rank whose shard is not
there asks one whose node has it; a thread of that one answers, and sends the part over a link of the two. Nobody else
takes part, and whoever has its own shard waits for nobody. The waits of those who lack theirs are bounded:

- for word from ranks that have not begun to load, until all have, or ``local_patience_s`` is over;
- where the whole node holds nothing: for another rank's choice of what to load, while some rank may still choose.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable

from tiered_checkpoint_io.engine.ranks.transfer import (
    SlotPlace,
    find_part,
    receive_part,
    receive_status,
    send_held_part,
    send_status,
    text_of,
)
from tiered_checkpoint_io.engine.replication.peer_link import Board, Link, Offer
from tiered_checkpoint_io.errors import PeerError
from tiered_checkpoint_io.logs import Logger, rate
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model.manifest import Part


class LocalPeers:
    """One rank's end of it, for the life of a session."""

    def __init__(
        self, tier: MemoryTier, board: Board, rank: int, world_size: int, logger: Logger, *, timeout_s: float
    ) -> None:
        """Takes what does not change; its thread begins with the first load.

        Args:
            tier: This node's memory.
            board: Of the ranks of this start of the job.
            rank: This one.
            world_size: How many there are.
            logger: Where to log.
            timeout_s: Bound of all that a load waits for, seconds.
        """
        self._tier = tier
        self._board = board
        self._clock = board.clock
        self._timing = board.clock.timing
        self._rank = rank
        self._world = world_size
        self._log = logger
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._load = ""
        self._served = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------------------------- of a load
    def begin(self, load: str, held: Iterable[tuple[str, int]]) -> None:
        """Leaves word of what this node's memory holds: save ids and shards; from now on, others may ask for it."""
        self._board.note(f"{load}/held/{self._rank}", json.dumps(sorted(held)))
        with self._changed:
            self._load = load
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._give_all, name="tiered-give-copies", daemon=True)
            self._thread.start()

    def end(self, load: str) -> None:
        """Leaves word that this rank's load is over, however it ended."""
        self._board.note(f"{load}/over/{self._rank}", "-")
        self._board.add(f"{load}/over")

    def await_choice(self, load: str, chosen: Callable[[], str | None]) -> str | None:
        """What another rank has chosen to load, waiting for it where one may still choose."""
        deadline = self._clock.monotonic() + min(self._timeout_s, self._timing.local_patience_s)
        while self._clock.monotonic() < deadline:
            found = chosen()
            if found is not None:
                return found
            held = self._held(load)
            able = [rank for rank, theirs in held.items() if theirs and not self._is_over(load, rank)]
            if len(held) == self._world and not able:
                # One that is over by now may have chosen since we looked.
                return chosen()
            self._clock.sleep(self._timing.local_poll_s)
        return chosen()

    def fetch(
        self, load: str, save_id: str, shard: int, is_drained: Callable[[Part], bool]
    ) -> tuple[StoredPart | None, list[str]]:
        """Has a part sent from another node's memory to this one's, verified, and made this node's own.

        Args:
            load: Which load.
            save_id: Of which save.
            shard: Whose part.
            is_drained: Whether the durable tier needs nothing more of it.

        Returns:
            The part, or None; and what was tried in vain.
        """
        deadline, tried = self._clock.monotonic() + min(self._timeout_s, self._timing.local_patience_s), set()
        notes: list[str] = []
        while True:
            held = self._held(load)
            for rank in sorted(held, key=lambda other: (other - self._rank) % self._world):
                if rank in tried or [save_id, shard] not in held[rank]:
                    continue
                tried.add(rank)
                try:
                    return self._get(rank, save_id, shard, is_drained), notes
                except Exception as error:
                    notes.append(f"shard {shard}: peer (rank {rank}): {text_of(error)}")
                    self._log.error("skipping this copy, trying the next: %s", notes[-1])
            if len(held) == self._world or self._clock.monotonic() > deadline:
                return None, notes
            self._clock.sleep(self._timing.local_poll_s)

    def close(self) -> None:
        """Ends the thread, once nobody loads any more, or after a few seconds."""
        if self._thread is not None:
            self._end_thread(self._thread)
        self._board.close()

    def _end_thread(self, thread: threading.Thread) -> None:
        deadline = self._clock.monotonic() + self._timing.local_linger_s
        with contextlib.suppress(PeerError):
            while not self._all_over() and self._clock.monotonic() < deadline and thread.is_alive():
                self._clock.sleep(self._timing.local_poll_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._clock.join(thread, self._timing.message_s)

    # ------------------------------------------------------------------------------------- asking
    def _held(self, load: str) -> dict[int, list[list[object]]]:
        told = {rank: self._board.noted(f"{load}/held/{rank}") for rank in range(self._world)}
        return {rank: json.loads(each) for rank, each in told.items() if each is not None}

    def _is_over(self, load: str, rank: int) -> bool:
        return self._board.noted(f"{load}/over/{rank}") is not None

    def _get(self, source: int, save_id: str, shard: int, is_drained: Callable[[Part], bool]) -> StoredPart:
        started = self._clock.monotonic()
        key = f"{source}/{self._board.add(f'asked/{source}')}"
        self._board.note(f"ask/{key}", json.dumps([save_id, shard]))
        while self._board.noted(f"taken/{key}") is None:
            if self._clock.monotonic() > started + min(self._timeout_s, self._timing.local_taken_s):
                raise PeerError("it does not answer", operation="load", rank=source)
            self._clock.sleep(self._timing.local_poll_s / 4)
        link = Link(self._board, Offer(key, source, key, 0), sends=False, timeout_s=self._message_s)
        try:
            problem = receive_status(link)
            if problem:
                raise PeerError(problem, operation="load", rank=source)
            described = bytearray(int(receive_status(link)))
            link.receive(memoryview(described))
            part = Part.from_json(bytes(described), where=f"rank {source}")
            stored = receive_part(link, part, SlotPlace(self._tier, part))
        finally:
            link.close()
        if is_drained(part):
            self._tier.mark_drained(stored)
        size = part.content.size
        self._log.info(
            "Step %d: shard %d of %s is back from rank %d: %s",
            part.content.step,
            shard,
            part.name,
            source,
            rate(size, self._clock.monotonic() - started),
        )
        return stored

    # ------------------------------------------------------------------------------------- giving
    def _give_all(self) -> None:
        try:
            while not self._is_closing:
                key = f"{self._rank}/{self._served + 1}"
                asked = self._board.noted(f"ask/{key}")
                if asked is not None:
                    self._served += 1
                    self._give(key, *json.loads(asked))
                    continue
                idle = self._all_over()
                with self._changed:
                    if not self._is_closing:
                        # While all train, nobody asks.
                        if idle and self._all_over():
                            self._changed.wait()
                        else:
                            self._clock.wait(self._changed, self._timing.local_poll_s)
        except PeerError as error:
            # The store is gone with the rank that holds it: the job is at its end.
            self._log.debug("nobody can ask for copies any more: %s", error)
        except Exception as error:
            self._log.error("copies are given to nobody any more: %s", text_of(error))

    def _all_over(self) -> bool:
        over = self._board.add(f"{self._load}/over", 0)
        return over >= self._world

    def _give(self, key: str, save_id: str, shard: int) -> None:
        """Sends one part; its failure concerns who asked, and is only noted here."""
        try:
            self._board.note(f"taken/{key}", "-")
            link = Link(self._board, Offer(key, self._rank, key, 0), sends=True, timeout_s=self._message_s)
            try:
                try:
                    part = find_part(self._tier, save_id, shard).part
                except Exception as error:
                    send_status(link, text_of(error))
                    return
                described = part.to_json()
                send_status(link)
                send_status(link, str(len(described)))
                link.send(memoryview(bytearray(described)))
                deadline = self._clock.monotonic() + self._timeout_s
                problem = send_held_part(link, self._tier, part, lambda: self._clock.monotonic() > deadline)
                if problem:
                    self._log.error("shard %s of %s was not received: %s", shard, part.name, problem)
            finally:
                link.close()
        except Exception as error:
            self._log.warning("shard %d of save %s was asked for, but not sent: %s", shard, save_id, text_of(error))

    @property
    def _message_s(self) -> float:
        return min(self._timeout_s, self._timing.message_s)
