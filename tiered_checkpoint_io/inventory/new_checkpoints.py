"""Which durable checkpoints of a look are new. Pure but for what it has seen."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_checkpoint_io.inventory.record import CheckpointInfo


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
