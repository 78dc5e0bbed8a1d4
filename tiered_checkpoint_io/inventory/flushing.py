"""Which checkpoints of a node's memory have to be uploaded where the node is about to go; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.errors import InvalidNameError
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content
from tiered_checkpoint_io.model.place import Place


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
    def missing(self) -> list[int]:
        """The ranks whose parts are not here."""
        held = {each.part.rank for each in self.parts}
        # Of a checkpoint of one part, any rank may have written it.
        return [] if self.content.parts == 1 else [rank for rank in range(self.content.parts) if rank not in held]

    @property
    def commits(self) -> bool:
        """Whether this node's drain commits it."""
        return any(each.part.commits for each in self.parts)


def saves_of(own: Iterable[StoredPart]) -> list[HeldSave]:
    """The saves of a node's own parts, the newest first."""
    found: dict[tuple[Place, str], list[StoredPart]] = {}
    for each in own:
        found.setdefault((each.part.place, each.save_id), []).append(each)
    saves = [HeldSave(place, tuple(parts)) for (place, _), parts in found.items()]
    return sorted(saves, key=lambda save: save.content.order, reverse=True)


def to_flush(own: Iterable[StoredPart], *, name: str | None = None, everything: bool = False) -> list[HeldSave]:
    """The saves that have to be on the durable tier, the newest first; they may be there already.

    Args:
        own: This node's own parts.
        name: Only the newest save of this name, which may be given as a path or URL below its durable tier.
        everything: All saves.

    Returns:
        By default, of each durable tier the newest save that training can resume from and that is complete here. Where
        parts of newer ones are on other nodes, this node can't tell which of them is complete: then these as well.
    """
    saves = saves_of(own)
    if everything:
        return saves
    chosen: list[HeldSave] = []
    for place in dict.fromkeys(save.place for save in saves):
        here = [save for save in saves if save.place == place]
        if name is not None:
            chosen += [save for save in here if save.name == _name_at(place, name)][:1]
        else:
            chosen += _newest([save for save in here if save.content.resumable])
    return chosen


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
    # All ranks of this job are on this node: what is incomplete here is so everywhere.
    is_alone = all(save.content.parts == saves[complete].content.parts for save in saves[:complete])
    return saves[complete : complete + 1] if is_alone else saves[: complete + 1]
