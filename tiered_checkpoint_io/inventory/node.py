"""What this node's memory holds: each namespace, looked at once, without asking a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiered_checkpoint_io.engine.drain.locks import is_locked
from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.errors import FormatVersionError, ManifestError
from tiered_checkpoint_io.inventory.record import Tier
from tiered_checkpoint_io.inventory.roots import all_roots, tier_at
from tiered_checkpoint_io.memory.parts import PART_FILE, REPLICAS, StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.place import Place

#: What has become of a part, as far as this node can tell: ``waiting`` for the durable tier; ``durable``: this node has
#: committed its save there; ``sent``: it is there, and another node commits its save; ``unknown``: a copy of what
#: others upload, or too long ago; ``memory_only``: it was never to go there, or was given up, or was deleted there.
PartState = Literal["waiting", "durable", "sent", "unknown", "memory_only"]


@dataclass(frozen=True, slots=True)
class HeldPart:
    """An intact part in node memory, as far as its description tells.

    Attributes:
        stored: What it is, and where it lies.
        tier: Which memory: the node's, its spill, or what it keeps for other nodes.
        namespace: Whose.
        outcome: What the drain has noted of its upload, or of a later delete of its name; None where it has not, or too
            long ago.
    """

    stored: StoredPart
    tier: Tier
    namespace: str
    outcome: Outcome | None = None

    @property
    def state(self) -> PartState:
        """What has become of it."""
        outcome, stored = self.outcome, self.stored
        if stored.pending:
            return "waiting"
        is_gone = outcome is not None and (outcome.state != "committed" or outcome.action == "delete")
        if is_gone or not stored.part.durable:
            return "memory_only"
        if outcome is None or stored.is_replica:
            # Also what a restore has brought, from the durable tier or from a node that has yet to upload it.
            return "unknown"
        return "durable" if stored.part.commits else "sent"


@dataclass(frozen=True, slots=True)
class BrokenPart:
    """A part that can't be used.

    Attributes:
        folder: Where it lies.
        why: What is wrong with it.
        part: What it was; None where that can't be read.
        place: The durable tier that it belongs to, or, where its description can't be read, that of its namespace.
        is_newer: Whether it has another format version: then it is not damaged.
    """

    folder: Path
    why: str
    part: Part | None
    place: Place | None
    is_newer: bool = False

    @property
    def save_id(self) -> str:
        """The save that it is of, as its description or its folder tells; "" where neither does."""
        if self.part is not None:
            return self.part.save_id
        in_quarantine = self.folder.name.removeprefix(f"{REPLICAS}.").partition(".rank-")[0]
        return next((each for each in (self.folder.parent.name, in_quarantine) if ids.is_save_id(each)), "")


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What all namespaces of this user on this node hold.

    Attributes:
        held: Intact parts.
        broken: Parts that can't be used.
        waiting: Operations that wait for the durable tier, in order.
        working_on: Names of the checkpoints that drains upload now.
    """

    held: tuple[HeldPart, ...] = ()
    broken: tuple[BrokenPart, ...] = ()
    waiting: tuple[Request, ...] = ()
    working_on: frozenset[str] = frozenset()

    def at(self, place: Place) -> NodeMemory:
        """What of it belongs to one durable tier."""
        return NodeMemory(
            tuple(each for each in self.held if each.stored.part.place == place),
            tuple(each for each in self.broken if each.place == place),
            tuple(each for each in self.waiting if each.place == place),
            self.working_on,
        )

    @property
    def places(self) -> list[Place]:
        """The durable tiers that something here belongs to."""
        found = {each.stored.part.place for each in self.held} | {each.place for each in self.waiting if each.dirpath}
        return sorted(found | {each.place for each in self.broken if each.place is not None}, key=str)


def look_at_node(memory_dir: str) -> NodeMemory:
    """Looks at the memory of this node.

    Raises:
        ConfigError: The folder does not exist.
    """
    held: list[HeldPart] = []
    broken: list[BrokenPart] = []
    waiting: list[Request] = []
    working_on: set[str] = set()
    for root in all_roots(memory_dir):
        # What is cleaned away while it is looked at is gone.
        with contextlib.suppress(FileNotFoundError):
            tier, queue = tier_at(root), Queue(root)
            outcomes = queue.outcomes()
            held += [held_part(tier, stored, outcomes) for stored in tier.held()]
            broken += _broken(tier)
            waiting += queue.look(tier)
            if (root / LOCK_FILE).exists() and is_locked(root / LOCK_FILE):
                working_on.add(queue.progress().name)
    return NodeMemory(tuple(held), tuple(broken), tuple(waiting), frozenset(working_on - {""}))


def held_part(tier: MemoryTier, stored: StoredPart, outcomes: Iterable[Outcome]) -> HeldPart:
    """A part of a tier, or of its replicas, with what became of it."""
    return HeldPart(stored, tier_of(tier, stored.folder), tier.root.name, _outcome(stored, outcomes))


def tier_of(tier: MemoryTier, folder: Path) -> Tier:
    """Which memory a part of a tier, or of its replicas, lies in."""
    if folder.parent.parent.name == REPLICAS:
        return "replicas"
    return "spill" if tier.is_spilled(folder) else "memory"


def _outcome(stored: StoredPart, outcomes: Iterable[Outcome]) -> Outcome | None:
    """What became of a part on the durable tier last."""
    part, last = stored.part, None
    for each in outcomes:
        # One that was skipped, as for a hold, has deleted nothing.
        is_delete = (each.action, each.state, each.name) == ("delete", "committed", part.name)
        is_gone = is_delete and each.op_id > part.save_id and each.place == part.place
        if each.op_id == stored.op_id or is_gone:
            last = each
    return last


def _broken(tier: MemoryTier) -> Iterator[BrokenPart]:
    for folder, error in tier.unreadable():
        yield BrokenPart(folder, str(error), None, tier.place, isinstance(error, FormatVersionError))
    for folder in tier.quarantined():
        part, why = None, "found damaged"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            why = (folder / "reason.txt").read_text() or why
        path = folder / PART_FILE
        with contextlib.suppress(OSError, ManifestError):
            part = Part.from_json(path.read_bytes(), where=str(path))
        yield BrokenPart(folder, f"in quarantine: {why}", part, part.place if part is not None else tier.place)
