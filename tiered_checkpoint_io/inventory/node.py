"""The memory of this node: each namespace, looked at without asking a server, and the parts that must not be lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeAlias

from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE, last_config, tier_at
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.engine.leasing import TRAINERS
from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, is_other_format
from tiered_checkpoint_io.memory.node import is_locked, release, try_lock
from tiered_checkpoint_io.memory.parts import PART_FILE, REPLICAS, StoredPart
from tiered_checkpoint_io.memory.tier import FOLDERS, MemoryTier, namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Content, Kind, Part
from tiered_checkpoint_io.model.retention import UnitKey, unit_of
from tiered_checkpoint_io.stores import place_of

Tier = Literal["memory", "spill", "replicas", "durable"]
#: The state of a part, as far as this node knows: ``waiting`` for the durable tier; ``durable``: this node has
#: committed its save there; ``sent``: it is there, and another node commits its save; ``unknown``: a copy of a part
#: that another node uploads, or too long ago; ``memory_only``: not for the durable tier, or given up, or deleted there.
PartState = Literal["waiting", "durable", "sent", "unknown", "memory_only"]
#: Durable tier and step.
Unit: TypeAlias = tuple[Place, UnitKey]


# ------------------------------------------------------------------------------------------- roots
def all_roots(memory_dir: str) -> list[Path]:
    """Returns the memory tiers of all of this user's namespaces; raises ConfigError if the folder does not exist."""
    if not os.path.isdir(memory_dir):
        raise ConfigError(f"there is no folder {memory_dir}", hint="check --memory-dir")
    folder = namespace_root(memory_dir, "default").parent
    return sorted(each for each in folder.glob("[!.]*") if _is_tier(each))


def roots_of(memory_dir: str, place: Place) -> list[Path]:
    """Returns those whose last trainer saved to ``place``; the last to be written to first. Raises as all_roots."""
    configs = {root: last_config(root) for root in all_roots(memory_dir)}
    found = [root for root, config in configs.items() if config is not None and place_of(config) == place]
    return sorted(found, key=lambda root: (root / CONFIG_FILE).stat().st_mtime, reverse=True)


def existing(root: Path) -> Path:
    """Returns the root of a memory tier; raises ConfigError if there is none."""
    if not _is_tier(root):
        raise ConfigError(f"no memory tier at {root}", hint="check --memory-dir and --namespace")
    return root


def owned(root: Path) -> Path:
    """Returns the root of a memory tier for commands that make folders there; raises ConfigError for another user's."""
    owner = root.stat().st_uid
    if owner != os.getuid():
        text = f"{root} belongs to user {owner}, and this command runs as user {os.getuid()}; nothing was changed"
        raise ConfigError(text, hint=f"run it as that user, such as by: sudo -u '#{owner}'")
    return root


def _is_tier(root: Path) -> bool:
    return all((root / folder).is_dir() for folder in FOLDERS)


def has_trainer(root: Path) -> bool:
    """Returns True if a process lives that may add to the memory."""
    for path in filter(Path.exists, (root / name for name in TRAINERS)):
        lock = try_lock(path)
        if lock is None:
            return True
        release(lock)
    return False


def undone(root: Path) -> int:
    """Counts the operations that wait for the durable tier."""
    try:
        return len(Queue(root).look(tier_at(root)))
    except FileNotFoundError:
        # Half cleaned away already.
        return 0


# ------------------------------------------------------------------------------------------- parts
@dataclass(frozen=True, slots=True)
class HeldPart:
    """An intact part in node memory."""

    name: str
    save_id: str
    rank: int
    tier: Tier
    #: The namespace of its memory.
    namespace: str
    folder: Path
    size_bytes: int
    state: PartState
    #: True if all parts of its save are in the memory of other nodes as well.
    is_replicated: bool
    stored: StoredPart = field(repr=False)

    @property
    def place(self) -> Place:
        """The durable tier that it belongs to."""
        return self.stored.part.place


def held_part(tier: MemoryTier, stored: StoredPart, outcomes: Iterable[Outcome]) -> HeldPart:
    """Returns a part of a tier, or of its replicas, with its state by the drain's outcomes."""
    part = stored.part
    return HeldPart(
        name=part.name,
        save_id=part.save_id,
        rank=part.rank,
        tier=tier_of(tier, stored.folder),
        namespace=tier.root.name,
        folder=stored.folder,
        size_bytes=part.content.size,
        state=_state(stored, _outcome(stored, outcomes)),
        is_replicated=stored.replicated,
        stored=stored,
    )


def _state(stored: StoredPart, outcome: Outcome | None) -> PartState:
    if stored.pending:
        return "waiting"
    is_gone = outcome is not None and (outcome.state != "committed" or outcome.action == "delete")
    if is_gone or not stored.part.durable:
        return "memory_only"
    if outcome is None or stored.is_replica:
        # Also parts that a restore has copied, from the durable tier or from a node that has yet to upload them.
        return "unknown"
    return "durable" if stored.part.commits else "sent"


def tier_of(tier: MemoryTier, folder: Path) -> Tier:
    """Returns the kind of memory that has a part of a tier, or of its replicas."""
    if folder.parent.parent.name == REPLICAS:
        return "replicas"
    return "spill" if tier.is_spilled(folder) else "memory"


def _outcome(stored: StoredPart, outcomes: Iterable[Outcome]) -> Outcome | None:
    """Returns the last outcome of a part on the durable tier."""
    part, last = stored.part, None
    for each in outcomes:
        # A skipped delete, as for a hold, has deleted no checkpoint.
        is_delete = (each.action, each.state, each.name) == ("delete", "committed", part.name)
        is_gone = is_delete and each.op_id > part.save_id and each.place == part.place
        if each.op_id == stored.op_id or is_gone:
            last = each
    return last


@dataclass(frozen=True, slots=True)
class BrokenPart:
    """A part that can't be used, and why."""

    folder: Path
    why: str
    #: Its description; None if that can't be read.
    part: Part | None = field(repr=False)
    #: Its durable tier; without a description, the durable tier of its namespace.
    place: Place | None
    #: True if it has another format version: then it is not damaged.
    is_newer: bool = False
    #: None in quarantine.
    tier: Tier | None = None

    @property
    def save_id(self) -> str:
        """Id of its save, by its description or its folder; "" if neither has it."""
        if self.part is not None:
            return self.part.save_id
        in_quarantine = self.folder.name.removeprefix(f"{REPLICAS}.").partition(".rank-")[0]
        return next((each for each in (self.folder.parent.name, in_quarantine) if ids.is_save_id(each)), "")


@dataclass(frozen=True, slots=True)
class Namespace:
    """The memory of one namespace at one moment, its queue, and its drain."""

    namespace: str
    root: Path
    #: The durable tier of the last trainer; None if it is not known.
    place: Place | None
    parts: list[HeldPart]
    #: Parts that can't be read: unknown if they are needed. Those in quarantine are not.
    damaged: list[BrokenPart]
    quarantined: list[BrokenPart] = field(repr=False)
    waiting: list[Request]
    outcomes: list[Outcome]
    drain: DrainProgress
    #: True if the drain runs.
    is_working: bool = field(repr=False)

    @property
    def broken(self) -> list[BrokenPart]:
        """Parts that can't be used."""
        return [*self.damaged, *self.quarantined]

    @property
    def places(self) -> set[Place]:
        """The durable tiers that something here belongs to."""
        found = {each.place for each in self.parts} | {each.place for each in self.waiting if each.dirpath}
        return found | {each.place for each in self.broken if each.place is not None}


def look_at(root: Path) -> Namespace:
    """Looks at the memory of one namespace; raises FileNotFoundError if it is gone."""
    tier, queue, lock = tier_at(root), Queue(root), root / LOCK_FILE
    outcomes = queue.outcomes()
    return Namespace(
        namespace=root.name,
        root=root,
        place=tier.place,
        parts=[held_part(tier, stored, outcomes) for stored in tier.held()],
        damaged=[
            BrokenPart(folder, str(error), None, tier.place, is_other_format(error), tier_of(tier, folder))
            for folder, error in tier.unreadable()
        ],
        quarantined=[_quarantined(tier, folder) for folder in tier.quarantined()],
        waiting=queue.look(tier),
        outcomes=outcomes,
        drain=queue.progress(),
        is_working=lock.exists() and is_locked(lock),
    )


def look_at_node(memory_dir: str) -> list[Namespace]:
    """Looks at the memory of all namespaces of this user on this node; raises as :func:`all_roots`."""
    found: list[Namespace] = []
    for root in all_roots(memory_dir):
        # A folder that is cleaned away during the look is gone.
        with contextlib.suppress(FileNotFoundError):
            found.append(look_at(root))
    return found


def places_of(node: Iterable[Namespace]) -> list[Place]:
    """Returns the durable tiers that something on a node belongs to."""
    return sorted({place for each in node for place in each.places}, key=str)


def _quarantined(tier: MemoryTier, folder: Path) -> BrokenPart:
    part, why = None, "found damaged"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        why = (folder / "reason.txt").read_text() or why
    path = folder / PART_FILE
    with contextlib.suppress(OSError, CorruptCheckpointError):
        part = Part.from_json(path.read_bytes(), where=str(path))
    return BrokenPart(folder, f"in quarantine: {why}", part, part.place if part is not None else tier.place)


def time_of(seconds: float) -> datetime | None:
    """Returns a time in seconds since the epoch; None if there is no such time: the writer's clock said so."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


# ------------------------------------------------------------------------------------------- saves
@dataclass(frozen=True, slots=True)
class HeldSave:
    """One save, as far as it is in this node's own memory: its durable tier, and this node's own parts of it."""

    place: Place
    parts: tuple[StoredPart, ...]

    @property
    def name(self) -> str:
        return self.parts[0].part.name

    @property
    def content(self) -> Content:
        """The facts of the save; the files are those of one part."""
        return self.parts[0].part.content

    @property
    def unit(self) -> Unit:
        """Key of checkpoints that a restart may need together, such as those of process groups: all of one step."""
        return self.place, unit_of(self.name, self.content.step)

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are not here."""
        held = {each.part.rank for each in self.parts}
        # Of a checkpoint of one part, any rank may have written it.
        return [] if self.content.parts == 1 else [rank for rank in range(self.content.parts) if rank not in held]


def saves_of(parts: Iterable[StoredPart]) -> list[HeldSave]:
    """Returns the saves that parts are of, the newest first."""
    found: dict[tuple[Place, str], list[StoredPart]] = {}
    for each in parts:
        found.setdefault((each.part.place, each.save_id), []).append(each)
    saves = [HeldSave(place, tuple(parts)) for (place, _), parts in found.items()]
    return sorted(saves, key=lambda save: save.content.order, reverse=True)


def to_flush(
    own: Iterable[StoredPart], *, name: str | None = None, everything: bool = False, without: Collection[Unit] = ()
) -> list[HeldSave]:
    """Chooses of this node's parts the saves that have to be on the durable tier, the newest first. Pure.

    By default: for each durable tier and payload, the saves that training can resume from, down to the newest one that
    is complete here; parts of newer ones may be on other nodes. With each save, all of its unit. ``name`` may be a path
    or URL below the durable tier.
    """
    saves = [save for save in saves_of(own) if save.unit not in without]
    if everything:
        return saves
    chosen: list[HeldSave] = []
    if name is not None:
        named = {save.place: save for save in reversed(saves) if save.name == _name_at(save.place, name)}
        chosen = list(named.values())
    for group in by_payload(saves) if name is None else ():
        complete = next((number for number, save in enumerate(group) if not save.missing), len(group))
        chosen += group[: complete + 1]
    units, newest = {save.unit for save in chosen}, dict[tuple[Place, str], HeldSave]()
    for save in saves:
        if save.unit in units:
            newest.setdefault((save.place, save.name), save)
    return list(newest.values())


def by_payload(saves: Iterable[HeldSave]) -> list[list[HeldSave]]:
    """Groups the saves that training can resume from by durable tier and payload: each adapter looks for its own."""
    groups: dict[tuple[Place, Kind], list[HeldSave]] = {}
    for save in saves:
        if save.content.resumable:
            groups.setdefault((save.place, save.content.kind), []).append(save)
    return list(groups.values())


def _name_at(place: Place, name: str) -> str | None:
    """Returns a name, or a path or URL below a durable tier, as its name there; None if it is none of this one."""
    try:
        return ids.name_in(place.dirpath, name)
    except ConfigError:
        return None
