"""Attempts of torchrun: each rank learns its own without waiting for other ranks.

torchrun starts ranks again that have failed, or whose number changes, and may keep the store of torch.distributed, with
all its keys. A count of restarts is no name for an attempt: each agent counts for itself, and the agent of a
replacement node begins at 0. So the first rank names an attempt, and each rank enters itself there once. A rank that
finds itself entered is in a later attempt, and names that one.

A rank that died before it had entered may then join the attempt before the latest. That rank is refused as soon as it
asks again: a rank whose attempt is not the latest does not save, and names no other one.
"""

from __future__ import annotations

import os

from tiered_checkpoint_io.engine.ranks.store_client import StoreClient
from tiered_checkpoint_io.errors import ConfigError

_KEY = "attempt"


def outlives_attempts() -> bool:
    """Returns True if the store is kept from one attempt to the next, as the store of torchrun's agents is."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


class LeftBehindError(ConfigError):
    """Other ranks of the job were started again, and this one was not."""


def enter(client: StoreClient, rank: int, token: str) -> str:
    """Enters a rank into its attempt; PeerError if the store does not answer within a bound.

    Args:
        client: Asks the store.
        rank: The rank, among all.
        token: Id of this process, and the same if it asks again, as an answer may have been lost. The attempt is
            named so if this rank is the first.

    Returns:
        The attempt's name.
    """
    named = ""
    while True:
        named = client.swap(_KEY, named, token)
        if _mark(client, named, rank, token):
            return named


def check(client: StoreClient, rank: int, token: str, attempt: str) -> None:
    """Checks whether a rank's attempt is the newest; as :func:`enter`.

    Raises:
        LeftBehindError: The attempt is not the newest.
    """
    newest = client.get(_KEY) or attempt
    if newest != attempt:
        # The next process of this rank is to find that it was in that attempt.
        _mark(client, newest, rank, token)
        raise LeftBehindError(
            "other ranks of this job were started anew, and this one was not",
            operation="agree",
            rank=rank,
            hint="end this process: torchrun starts all ranks again once one has ended",
        )


def _mark(client: StoreClient, attempt: str, rank: int, token: str) -> bool:
    return client.swap(f"{_KEY}/{attempt}/{rank}", "", token) == token
