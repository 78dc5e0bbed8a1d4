"""The memory of this node: each namespace, looked at without asking a server, and the parts that must not be lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeAlias

from tiered_checkpoint_io.engine.drain.operations import Outcome, Request
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE, last_config, tier_at
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.engine.leasing import TRAINERS
from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, is_other_format
from tiered_checkpoint_io.inventory.durable import resumable
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
#: Durable tier, step, and the name without its folder.
Unit: TypeAlias = tuple[Place, UnitKey, str]


# ------------------------------------------------------------------------------------------- roots
def all_roots(memory_dir: str) -> list[Path]:
    """Returns the memory tiers of all of this user's namespaces.

    Raises:
        ConfigError: The folder does not exist.
    """
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
    """Returns the root of a memory tier.

    Raises:
        ConfigError: There is none.
    """
    if not _is_tier(root):
        raise ConfigError(f"no memory tier at {root}", hint="check --memory-dir and --namespace")
    return root


def owned(root: Path) -> Path:
    """Returns the root of a memory tier, for commands that write there.

    Raises:
        ConfigError: The root is another user's, whose trainer and drain could not open folders that root makes there.
    """
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
    """An intact part in node memory, by its description.

    Attributes:
        name: The checkpoint.
        dirpath: The durable tier that it belongs to.
        server: The durable tier's endpoint; None for AWS's own, or if it is not known.
        save_id: The save that made it.
        step: The training step; None if it is not known.
        rank: The rank that wrote it.
        tier: The kind of memory: the node's, its spill, or its replicas of other nodes' parts.
        namespace: The namespace of its memory.
        folder: Its folder.
        size_bytes: Its bytes.
        created: Time of the save (UTC).
        is_for_durable: It was to go to the durable tier.
        is_pending: It waits for the durable tier.
        state: See :data:`PartState`.
        is_replicated: All parts of its save are in the memory of other nodes as well.
        resumable: Training can resume from it.
        is_latest: ``tiered:latest`` means its save, among all saves that its namespace has in memory.
        stored: The part itself.
        outcome: The drain's note of its upload, or of a later delete of its name; None if there is none.
    """

    name: str
    dirpath: str
    server: str | None
    save_id: str
    step: int | None
    rank: int
    tier: Tier
    namespace: str
    folder: Path
    size_bytes: int
    created: datetime | None
    is_for_durable: bool
    is_pending: bool
    state: PartState
    is_replicated: bool
    resumable: bool
    stored: StoredPart = field(repr=False)
    outcome: Outcome | None = field(repr=False)
    is_latest: bool = False

    @property
    def place(self) -> Place:
        """The durable tier that it belongs to."""
        return self.stored.part.place


def held_part(tier: MemoryTier, stored: StoredPart, outcomes: Iterable[Outcome]) -> HeldPart:
    """Returns a part of a tier, or of its replicas, with its outcome."""
    part, content, outcome = stored.part, stored.part.content, _outcome(stored, outcomes)
    return HeldPart(
        name=part.name,
        dirpath=part.dirpath,
        server=part.place.endpoint or None,
        save_id=part.save_id,
        step=ids.known(content.step),
        rank=part.rank,
        tier=tier_of(tier, stored.folder),
        namespace=tier.root.name,
        folder=stored.folder,
        size_bytes=content.size,
        created=time_of(content.created),
        is_for_durable=part.durable,
        is_pending=stored.pending,
        state=_state(stored, outcome),
        is_replicated=stored.replicated,
        resumable=content.resumable,
        stored=stored,
        outcome=outcome,
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
    """A part that can't be used.

    Attributes:
        folder: Its folder.
        why: The damage.
        part: Its description; None if that can't be read.
        place: Its durable tier; without a description, the durable tier of its namespace.
        is_newer: True if it has another format version: then it is not damaged.
        tier: The kind of memory that has it; None in quarantine.
    """

    folder: Path
    why: str
    part: Part | None
    place: Place | None
    is_newer: bool = False
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
    """The memory of one namespace at one moment, its queue, and its drain.

    Attributes:
        root: The root of the memory tier.
        place: The durable tier of the last trainer; None if it is not known.
        held: Intact parts.
        broken: Parts that can't be used.
        waiting: Operations that wait for the durable tier, in order.
        outcomes: Operations that have ended, in order.
        drain: Work of the drain.
        is_working: True if the drain runs.
    """

    root: Path
    place: Place | None
    held: list[HeldPart]
    broken: list[BrokenPart]
    waiting: list[Request]
    outcomes: list[Outcome]
    drain: DrainProgress
    is_working: bool

    @property
    def places(self) -> set[Place]:
        """The durable tiers that something here belongs to."""
        found = {each.place for each in self.held} | {each.place for each in self.waiting if each.dirpath}
        return found | {each.place for each in self.broken if each.place is not None}


def look_at(root: Path) -> Namespace:
    """Looks at the memory of one namespace; raises FileNotFoundError if it is gone."""
    tier, queue, lock = tier_at(root), Queue(root), root / LOCK_FILE
    outcomes = queue.outcomes()
    held = _marked([held_part(tier, stored, outcomes) for stored in tier.held()])
    is_working = lock.exists() and is_locked(lock)
    return Namespace(root, tier.place, held, [*_broken(tier)], queue.look(tier), outcomes, queue.progress(), is_working)


def _marked(held: list[HeldPart]) -> list[HeldPart]:
    """Marks the parts of the save that ``tiered:latest`` means, of each durable tier."""
    places = {each.place for each in held}
    meant = {at: next(iter(resumable((), [each.stored for each in held if each.place == at])), None) for at in places}
    saves = {at: found.save_id for at, found in meant.items() if found is not None}
    return [replace(each, is_latest=each.save_id == saves.get(each.place)) for each in held]


def look_at_node(memory_dir: str) -> list[Namespace]:
    """Looks at the memory of all namespaces of this user on this node.

    Raises:
        ConfigError: The folder does not exist.
    """
    found: list[Namespace] = []
    for root in all_roots(memory_dir):
        # A folder that is cleaned away during the look is gone.
        with contextlib.suppress(FileNotFoundError):
            found.append(look_at(root))
    return found


def places_of(node: Iterable[Namespace]) -> list[Place]:
    """Returns the durable tiers that something on a node belongs to."""
    return sorted({place for each in node for place in each.places}, key=str)


def _broken(tier: MemoryTier) -> Iterator[BrokenPart]:
    for folder, error in tier.unreadable():
        yield BrokenPart(folder, str(error), None, tier.place, is_other_format(error), tier_of(tier, folder))
    for folder in tier.quarantined():
        part, why = None, "found damaged"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            why = (folder / "reason.txt").read_text() or why
        path = folder / PART_FILE
        with contextlib.suppress(OSError, CorruptCheckpointError):
            part = Part.from_json(path.read_bytes(), where=str(path))
        yield BrokenPart(folder, f"in quarantine: {why}", part, part.place if part is not None else tier.place)


def time_of(seconds: float) -> datetime | None:
    """Returns a time in seconds since the epoch; None if there is no such time: the writer's clock said so."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


# ------------------------------------------------------------------------------------------- saves
@dataclass(frozen=True, slots=True)
class HeldSave:
    """One save, as far as it is in this node's own memory.

    Attributes:
        place: Its durable tier.
        parts: This node's own parts of it.
    """

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
    def size(self) -> int:
        """Bytes of the parts here."""
        return sum(each.part.content.size for each in self.parts)

    @property
    def unit(self) -> Unit:
        """Key of checkpoints that a restart may need together: weights and their averages, parts of process groups.

        Other checkpoints of the same step have names of their own, in any folder.
        """
        name = ids.without_companion(self.name, ids.EMA).rpartition("/")[2]
        return self.place, unit_of(self.name, self.content.step), name

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are not here."""
        held = {each.part.rank for each in self.parts}
        # Of a checkpoint of one part, any rank may have written it.
        return [] if self.content.parts == 1 else [rank for rank in range(self.content.parts) if rank not in held]

    @property
    def commits(self) -> bool:
        """True if this node's drain commits the save."""
        return any(each.part.commits for each in self.parts)


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
    """Chooses the saves that have to be on the durable tier, the newest first; some may be there already. Pure.

    Args:
        own: This node's own parts.
        name: Only the newest save of this name, which may be given as a path or URL below its durable tier.
        everything: All saves.
        without: Units that are not to be chosen.

    Returns:
        By default: the newest save that training can resume from, for each durable tier and payload, if it is complete
        here. If parts of newer saves are on other nodes, this node does not know which save is complete, so the newer
        saves as well. With each save, its whole unit.
    """
    saves = [save for save in saves_of(own) if save.unit not in without]
    if everything:
        return saves
    if name is not None:
        places = dict.fromkeys(save.place for save in saves)
        named = [[save for save in saves if (save.place, save.name) == (at, _name_at(at, name))] for at in places]
        return with_units([save for group in named for save in group[:1]], saves)
    return with_units([save for group in by_payload(saves) for save in _newest(group)], saves)


def by_payload(saves: Iterable[HeldSave]) -> list[list[HeldSave]]:
    """Groups the saves that training can resume from by durable tier and payload: each adapter looks for its own."""
    groups: dict[tuple[Place, Kind], list[HeldSave]] = {}
    for save in saves:
        if save.content.resumable:
            groups.setdefault((save.place, save.content.kind), []).append(save)
    return list(groups.values())


def with_units(chosen: Sequence[HeldSave], saves: Iterable[HeldSave]) -> list[HeldSave]:
    """Returns the saves of ``chosen``, and the newest of each other name in their units, the newest first."""
    units = {save.unit for save in chosen}
    ids_of = {(save.place, save.content.save_id) for save in chosen}
    names = {(save.place, save.name) for save in chosen}
    found: list[HeldSave] = []
    for save in saves:
        if (save.place, save.content.save_id) in ids_of:
            found.append(save)
        elif save.unit in units and (save.place, save.name) not in names and not _is_lost(save, chosen):
            names.add((save.place, save.name))
            found.append(save)
    return found


def _is_lost(save: HeldSave, chosen: Iterable[HeldSave]) -> bool:
    """Returns True if a save never became complete: another one of as many parts shows that all ranks are here."""
    return bool(save.missing) and any(not each.missing and each.content.parts == save.content.parts for each in chosen)


def _name_at(place: Place, name: str) -> str | None:
    """Returns a name, or a path or URL below a durable tier, as its name there; None if it is none of this one."""
    try:
        return ids.name_in(place.dirpath, name)
    except ConfigError:
        return None


def _newest(saves: list[HeldSave]) -> list[HeldSave]:
    complete = next((number for number, save in enumerate(saves) if not save.missing), None)
    if complete is None:
        return saves
    return [save for save in saves[: complete + 1] if not _is_lost(save, [saves[complete]])]
