"""Checkpoints removed at once, several at a time, by a process that holds the lease: what ``tiered-ckpt prune`` does.

Each has a journal of its own on the durable tier: the next prune finishes what was interrupted or refused.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Section, StoreJournal, finish_noted
from tiered_checkpoint_io.engine.durable.retention import in_order, remove
from tiered_checkpoint_io.engine.durable.survey import RemovalAttempt
from tiered_checkpoint_io.errors import CorruptCheckpointError, TieredCheckpointError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.retention import Checkpoint
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.refusals import Refusals


def unfinished(store: Store) -> list[str]:
    """The keys of the journals of what earlier prunes did not finish: one list."""
    return [entry.key for entry in store.list(ids.PRUNE_PREFIX)]


def finish(store: Store, journals: Iterable[str]) -> list[TieredCheckpointError]:
    """Removes what earlier prunes did not; what the server refuses again, or a newer release may need, stays noted.

    Returns:
        Why what stays does.

    Raises:
        StoreError: It does not answer.
    """
    refused, newer = Refusals(), list[CorruptCheckpointError]()

    def go_on(key: str) -> None:
        journal = StoreJournal(store, key)
        note = Section(journal, REMOVAL)
        try:
            with refused.kept():
                finish_noted(store, "prune", note)
                if not note.read():
                    # Also of one that is damaged, which tells nothing.
                    journal.clear()
        except CorruptCheckpointError as error:
            if error.reason != "format":
                raise
            newer.append(error)

    in_parallel(go_on, journals)
    return [*refused, *newer]


def remove_all(store: Store, going: Iterable[Checkpoint], stop: threading.Event) -> list[RemovalAttempt]:
    """Removes checkpoints, the oldest first, until ``stop`` is set; where one is refused, so stay others of its step.

    Raises:
        StoreError: The server does not answer, or refuses all deletes. Repeat the call to finish.
    """
    units: defaultdict[int | str, list[Checkpoint]] = defaultdict(list)
    for each in in_order(going):
        units[each.unit].append(each)
    attempts: list[RemovalAttempt] = []

    def remove_unit(unit: Iterable[Checkpoint]) -> None:
        for each in unit:
            if stop.is_set():
                return
            attempt = remove(store, each, journal=StoreJournal(store, ids.prune_key(each.name)))
            attempts.append(attempt)
            if attempt.refusal is not None and not attempt.is_gone:
                return

    in_parallel(remove_unit, units.values())
    return attempts
