"""Which checkpoints of a node's memory must not be lost where it is about to go; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tiered_checkpoint_io.errors import InvalidNameError
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Kind
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.model.retention import UnitKey, unit_of

#: Durable tier, step, and the name without its folder.
Unit: TypeAlias = tuple[Place, UnitKey, str]


@dataclass(frozen=True, slots=True)
class HeldSave:
    """One save, as far as this node's own memory holds it.

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
    def unit(self) -> Unit:
        """What a restart may need together: averages beside weights, and the parts of process groups.

        Other checkpoints of the same step have names of their own, in whatever folder.
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
        """Whether this node's drain commits it."""
        return any(each.part.commits for each in self.parts)


def saves_of(parts: Iterable[StoredPart]) -> list[HeldSave]:
    """The saves that parts are of, the newest first."""
    found: dict[tuple[Place, str], list[StoredPart]] = {}
    for each in parts:
        found.setdefault((each.part.place, each.save_id), []).append(each)
    saves = [HeldSave(place, tuple(parts)) for (place, _), parts in found.items()]
    return sorted(saves, key=lambda save: save.content.order, reverse=True)


def to_flush(
    own: Iterable[StoredPart],
    *,
    name: str | None = None,
    everything: bool = False,
    without: Collection[Unit] = (),
) -> list[HeldSave]:
    """The saves that have to be on the durable tier, the newest first; they may be there already.

    Args:
        own: This node's own parts.
        name: Only the newest save of this name, which may be given as a path or URL below its durable tier.
        everything: All saves.
        without: Units that are not to be chosen.

    Returns:
        By default, of each durable tier and payload the newest save that training can resume from and that is complete
        here. Where parts of newer ones are on other nodes, this node can't tell which of them is complete: then these
        as well. With each of them, its whole unit.
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
    """The saves that training can resume from, by durable tier and payload: each adapter looks for its own."""
    groups: dict[tuple[Place, Kind], list[HeldSave]] = {}
    for save in saves:
        if save.content.resumable:
            groups.setdefault((save.place, save.content.kind), []).append(save)
    return list(groups.values())


def with_units(chosen: Sequence[HeldSave], saves: Iterable[HeldSave]) -> list[HeldSave]:
    """The saves of ``chosen``, and the newest of each other name in their units, the newest first."""
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
    """Whether a save never became complete: where one of as many parts is complete here, all ranks are on this node."""
    return bool(save.missing) and any(not each.missing and each.content.parts == save.content.parts for each in chosen)


def _name_at(place: Place, name: str) -> str | None:
    """A name, or a path or URL below a durable tier, as its name there; None where it is none of this one."""
    try:
        return ids.name_in(place.dirpath, name)
    except InvalidNameError:
        return None


def _newest(saves: list[HeldSave]) -> list[HeldSave]:
    complete = next((number for number, save in enumerate(saves) if not save.missing), None)
    if complete is None:
        return saves
    return [save for save in saves[: complete + 1] if not _is_lost(save, [saves[complete]])]
