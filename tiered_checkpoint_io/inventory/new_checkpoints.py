"""Durable checkpoints that are new, and how they are kept while a program works on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tiered_checkpoint_io.engine.durable.holds import hold, release
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError
from tiered_checkpoint_io.inventory.record import CheckpointInfo
from tiered_checkpoint_io.stores import Store


class NewCheckpoints:
    """Gives each durable save once, however many names it has: an alias or a copy is nothing new."""

    def __init__(self, after: str | None = None) -> None:
        """``after``: the save after which to begin, "" for all; None for what the first look does not find."""
        self._after = after
        self._seen: set[str] = set()

    def of(self, checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """The new ones of all that a look found, in the order of their saves."""
        first: dict[str, CheckpointInfo] = {}
        # The checkpoint itself comes before its copies and aliases, which stand for it where it is gone.
        for each in sorted(checkpoints, key=lambda each: (each.order[0], not each.order[1], each.name)):
            if each.state == "durable" and "durable" in each.where:
                first.setdefault(each.order[0], each)
        begins = self._after is None
        if self._after is None:
            self._after = ""
        new = [each for save, each in first.items() if save not in self._seen and save > self._after and not begins]
        # What this look did not find may only be out of sight, such as while a file system is mounted anew.
        self._seen |= set(first)
        return new


@contextlib.contextmanager
def held(
    each: CheckpointInfo, ask: Callable[[Callable[[Store], Any]], Any], warn: Callable[[str], object]
) -> Iterator[bool]:
    """A block in which nothing deletes a checkpoint; gives whether the checkpoint is still there.

    Args:
        each: The checkpoint.
        ask: Asks its durable tier.
        warn: Shows a line if the checkpoint can't be held, as without the right to write.
    """
    name, key = each.alias_of or each.name, None
    try:
        key = ask(lambda store: hold(store, name, each.save_id))
    except CheckpointNotFoundError:
        yield False
        return
    except StoreError as error:
        warn(f"{name} is not held, and may be deleted during the work on it: {error}")
    try:
        yield True
    finally:
        if key is not None:
            try:
                ask(lambda store: release(store, key))
            except StoreError as error:
                warn(f"{name} stays held, for a day at most: {error}")
