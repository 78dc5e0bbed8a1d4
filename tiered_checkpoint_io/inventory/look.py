"""Looks at both tiers, and gives what they hold as one list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.manifests import manifest_cache
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreUnavailableError
from tiered_checkpoint_io.inventory.durable import checkpoints, incomplete_saves
from tiered_checkpoint_io.inventory.listing import DurableTier, checkpoints_of
from tiered_checkpoint_io.inventory.node import NodeMemory, look_at_node
from tiered_checkpoint_io.inventory.record import CheckpointInfo
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores import Store


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the tiers found.

    Attributes:
        place: The durable tier that was asked for.
        durable: What it holds; None where it was not asked, or did not answer.
        node: What this node's memory holds, of all durable tiers; empty where it was not looked at.
    """

    place: Place
    durable: DurableTier | None
    node: NodeMemory

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """One row for each checkpoint of the durable tier, the latest save first."""
        return checkpoints_of(self.place, self.durable, self.node)


class Looker:
    """Looks at the same tiers again and again; see :class:`DocumentCache`."""

    def __init__(self, place: Place, memory_dir: str | None = None, *, clock: Clock = SYSTEM) -> None:
        """Takes the durable tier, and the folder of node memory; None not to look there."""
        self._place = place
        self._memory_dir = memory_dir
        self._clock = clock
        self._manifests = manifest_cache()

    def look(self, store: Store | None, *, with_incomplete: bool = True) -> Look:
        """Looks at both tiers, at memory first: what is committed in between is seen twice, and not missed.

        Args:
            store: The durable tier; None to look at memory alone.
            with_incomplete: Whether to look for saves without a manifest as well.

        Raises:
            CheckpointNotFoundError: There is nothing at all at this dirpath.
            ConfigError: There is no such folder of node memory.
            StoreError: The durable tier could not be asked.
        """
        node = look_at_node(self._memory_dir) if self._memory_dir is not None else NodeMemory()
        look = Look(self._place, None, node)
        if store is None:
            return look
        try:
            found = checkpoints(store, self._manifests, self._clock)
        except CheckpointNotFoundError:
            if self._place not in node.places:
                raise
            found = []
        left = incomplete_saves(store, found) if with_incomplete else ()
        return replace(look, durable=DurableTier(found, left))


class RepeatedLook:
    """Looks again and again, for those who wait; a durable tier that is silent meanwhile is said once."""

    def __init__(self, look: Callable[[], Look], say: Callable[[str], object]) -> None:
        """Takes what looks, and what shows a line to the user."""
        self._look = look
        self._say = say
        self._found: list[CheckpointInfo] | None = None
        self._had_any = False
        self._why = ""

    @property
    def has_answered(self) -> bool:
        """Whether the durable tier has answered so far."""
        return self._found is not None

    def checkpoints(self) -> list[CheckpointInfo]:
        """What is there now; while a tier that has answered before is unreachable, what was there before.

        Raises:
            StoreError: The durable tier refuses, or is unreachable at the first look.
        """
        why, said = "", ""
        try:
            self._found = self._look().checkpoints
            self._had_any = self._had_any or bool(self._found)
        except CheckpointNotFoundError as error:
            self._found, why = [], "nothing"
            then = "any more; asking again" if self._had_any else "yet; waiting for the first checkpoint"
            said = f"there is nothing at {error.key} {then}"
        except StoreUnavailableError as error:
            if self._found is None:
                raise
            why, said = "silent", f"{error}; asking again"
        # An error's text may change from look to look.
        if why and why != self._why:
            self._say(said)
        self._why = why
        return self._found
