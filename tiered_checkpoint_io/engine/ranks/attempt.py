"""Which attempt of torchrun the ranks of this process group are in, agreed without waiting for each other.

torchrun starts ranks again that have failed, or whose number changes, and keeps the store of torch.distributed, with
all that was agreed in it. How often it has done so it tells each rank by the count of the rank's own agent, and that of
a node which takes the place of another begins at nought. So the first rank of an attempt that asks names it, and shows
for the rest of its life that it lives. Who finds a name that none shows the life of is in a later attempt: torchrun
ends all ranks of one before it begins the next.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.store_client import StoreClient
from tiered_checkpoint_io.errors import PeerError

_KEY = "attempt"


def name_attempt(origin: Any, prefix: str, clock: Clock) -> str:
    """The name of this attempt; where another launcher starts ranks, its store is a new one, and so there is none.

    Args:
        origin: The store of torch.distributed.
        prefix: Of all keys.
        clock: The clock, with the bounds.

    Raises:
        PeerError: The store does not answer within a bound.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return "0"
    client = StoreClient(origin, prefix, timeout_s=clock.timing.store_answer_s)
    mine, named = clock.token(8), ""
    try:
        while True:
            named = client.swap(_KEY, named, mine)
            if named == mine:
                threading.Thread(target=_live, args=(client, mine, clock), name="tiered-attempt", daemon=True).start()
                return mine
            if _is_alive(client, named, clock):
                client.close()
                return named
    except BaseException:
        client.close()
        raise


def _live(client: StoreClient, name: str, clock: Clock) -> None:
    try:
        while True:
            client.add(f"{_KEY}/{name}")
            clock.sleep(clock.timing.attempt_beat_s)
    except PeerError:
        # The rank or the agent that holds the store has ended, and nobody else can ask it, either.
        client.close()


def _is_alive(client: StoreClient, name: str, clock: Clock) -> bool:
    key, end = f"{_KEY}/{name}", clock.monotonic() + clock.timing.attempt_dead_s
    beats = client.add(key, 0)
    while clock.monotonic() < end:
        clock.sleep(clock.timing.attempt_beat_s)
        if client.add(key, 0) != beats:
            return True
    return False
