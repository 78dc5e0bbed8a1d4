"""Everything that is known of the checkpoints of one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.inventory.durable import latest
from tiered_checkpoint_io.inventory.look import Look
from tiered_checkpoint_io.inventory.node import HeldPart, PartState
from tiered_checkpoint_io.inventory.record import CheckpointInfo, Tier, time_of
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores import Store


@dataclass(frozen=True, slots=True)
class File:
    """A file."""

    path: Annotated[str, "Where it is; of a checkpoint's, below dirpath."]
    size_bytes: Annotated[int, "Its bytes."]


@dataclass(frozen=True, slots=True)
class PartHere:
    """A part of a checkpoint in this node's memory."""

    name: Annotated[str, "The checkpoint."]
    dirpath: Annotated[str, "The durable tier that it belongs to."]
    server: Annotated[str | None, "The endpoint of that; None for AWS's own, where there is none, or it is not known."]
    save_id: Annotated[str, "Which save made it."]
    step: Annotated[int | None, "The training step; None where it is not known."]
    rank: Annotated[int, "The rank that wrote it."]
    tier: Annotated[Tier, "Which memory."]
    namespace: Annotated[str, "In whose memory it is."]
    folder: Annotated[Path, "Where it lies."]
    size_bytes: Annotated[int, "Its bytes."]
    created: Annotated[datetime | None, "When it was saved (UTC)."]
    is_for_durable: Annotated[bool, "Whether it was to go to the durable tier."]
    is_pending: Annotated[bool, "Whether it waits for the durable tier."]
    state: Annotated[
        PartState,
        "What has become of it, as far as this node can tell. ``sent``: it is there, and another node commits its save;"
        " ``unknown``: a copy of what others upload, or too long ago.",
    ]
    is_replicated: Annotated[bool, "Whether all parts of its save are in the memory of other nodes as well."]
    resumable: Annotated[bool, "Whether training can resume from it."]
    is_latest: Annotated[bool, "Whether tiered:latest would take its save, of what its namespace has in memory."]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details(CheckpointInfo):
    """All that is known of one save of a name: its row in a listing, and the rest.

    Attributes:
        manifest_key: Its manifest below dirpath; None if it has none.
        namespace: The namespace that saved it; empty if it is not known.
        world_size: Number of ranks of the job.
        writer: Versions of the software that wrote it.
        aliases: Names of its aliases.
        previous_save_ids: Saves that its objects may hold during an overwrite.
        files: All files if the durable tier has them, else those of the parts here.
        held_parts: Its parts in this node's memory.
    """

    manifest_key: str | None
    namespace: str
    world_size: int | None
    writer: Mapping[str, str]
    aliases: Sequence[str]
    previous_save_ids: Sequence[str]
    files: Sequence[File]
    held_parts: Sequence[PartHere]


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
    held = look.node.at(look.place).held
    parts = [each.stored.part for each in held if each.stored.save_id == row.save_id and row.save_id]
    files = {entry.path: entry.size for part in parts for entry in part.content.files}
    contents = (target.content, *target.previous) if target is not None else ()
    known = (*contents, *(part.content for part in parts))
    content = next((each for each in known if each.save_id == row.save_id), None)
    if content is not None and target is not None and row.state == "durable":
        try:
            files = files_of(store, content).sizes if store is not None else files
        except CorruptCheckpointError as error:
            row = replace(row, state="corrupt", problem=str(error))
    return Details(
        **{each.name: getattr(row, each.name) for each in fields(row)},
        manifest_key=ids.manifest_key(row.name) if manifest is not None else None,
        namespace=content.namespace if content is not None else "",
        world_size=content.world_size if content is not None else None,
        writer=content.writer if content is not None else {},
        aliases=[each.name for each in rows if each.alias_of == row.name],
        previous_save_ids=[each.save_id for each in target.previous] if target is not None else [],
        files=[File(path, size) for path, size in files.items()],
        held_parts=[each for each in parts_here(held) if each.save_id == row.save_id],
    )


def parts_here(held: Sequence[HeldPart]) -> list[PartHere]:
    """Parts in node memory, as data."""
    together: dict[tuple[str, Place], list[StoredPart]] = {}
    for each in held:
        together.setdefault((each.namespace, each.stored.part.place), []).append(each.stored)
    choices = ((namespace, latest((), parts)) for (namespace, _), parts in together.items())
    latest_saves = {(namespace, meant.save_id) for namespace, meant in choices if meant is not None}
    return [_part_here(each, is_latest=(each.namespace, each.stored.save_id) in latest_saves) for each in held]


def _part_here(held: HeldPart, *, is_latest: bool) -> PartHere:
    part, content = held.stored.part, held.stored.part.content
    return PartHere(
        name=part.name,
        dirpath=part.dirpath,
        server=part.place.endpoint or None,
        save_id=part.save_id,
        step=ids.known(content.step),
        rank=part.rank,
        tier=held.tier,
        namespace=held.namespace,
        folder=held.stored.folder,
        size_bytes=content.size,
        created=time_of(content.created),
        is_for_durable=part.durable,
        is_pending=held.stored.pending,
        state=held.state,
        is_replicated=held.stored.replicated,
        resumable=content.resumable,
        is_latest=is_latest,
    )
