"""Everything that is known of the checkpoints of one name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.inventory.look import Look
from tiered_checkpoint_io.inventory.node import HeldPart
from tiered_checkpoint_io.inventory.record import CheckpointInfo
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content
from tiered_checkpoint_io.stores import Store

#: By what each chunk is verified.
HASH = "xxh3-128"


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """One save of a name, and all that is known of it.

    Attributes:
        info: Its row.
        content: What its manifest says, or a part in memory; None where neither can be read.
        manifest_key: Where its manifest lies on the durable tier; None where it has none.
        files: The size of each file, by its path below dirpath: of all where the durable tier has them, else of the
            parts on this node.
        held: Its parts in this node's memory.
        aliases: The names of its aliases.
        previous: Saves that the objects of its name may still hold, while it is being overwritten.
        problem: What is wrong with it, beside what its row says.
    """

    info: CheckpointInfo
    content: Content | None = None
    manifest_key: str | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    held: tuple[HeldPart, ...] = ()
    aliases: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()
    problem: str = ""


def details_of(name: str, look: Look, store: Store | None) -> list[Details]:
    """All saves of a name, the latest first: a name may have one on the durable tier, and a later one in memory.

    Args:
        name: The name, or ``tiered:latest``.
        look: What the tiers hold.
        store: The durable tier, from which the index of a checkpoint of several parts is read; None not to.

    Raises:
        StoreError: The durable tier could not be asked.
    """
    rows = look.checkpoints
    meant = [row for row in rows if (row.is_latest if name == ids.LATEST else row.name == name)]
    return [_details(row, rows, look, store) for row in meant]


def _details(row: CheckpointInfo, rows: list[CheckpointInfo], look: Look, store: Store | None) -> Details:
    durable = look.durable.manifests if look.durable is not None else []
    manifest = next((each for each in durable if each.name == row.name and "durable" in row.where), None)
    target = next((each for each in durable if manifest is not None and each.name == manifest.alias_of), manifest)
    held = tuple(each for each in look.node.at(look.place).held if each.stored.save_id == row.save_id and row.save_id)
    parts = [each.stored.part for each in held]
    files, problem = {entry.path: entry.size for part in parts for entry in part.content.files}, ""
    content = parts[0].content if parts else None
    if target is not None and row.state == "durable":
        content = target.content
        try:
            files = files_of(store, content).sizes if store is not None else files
        except CorruptCheckpointError as error:
            problem = str(error)
    return Details(
        info=row,
        content=content,
        manifest_key=ids.manifest_key(row.name) if manifest is not None else None,
        files=files,
        held=held,
        aliases=tuple(each.name for each in rows if each.alias_of == row.name),
        previous=tuple(each.save_id for each in target.previous) if target is not None else (),
        problem=problem,
    )
