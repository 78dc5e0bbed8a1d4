"""The command that reads checkpoints of both tiers, and compares every byte with its hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.checking import (
    Checked,
    CopyState,
    Report,
    check_part,
    unreadable,
)
from tiered_checkpoint_io.cli.documents import Verified
from tiered_checkpoint_io.cli.options import NODES, SERVER, Json, Nodes, Server, has_memory, name_of
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.cli.progress import Meter, progress
from tiered_checkpoint_io.engine.durable.damage import Damage, content_or_damage
from tiered_checkpoint_io.errors import CheckpointNotFoundError, FormatVersionError, StoreArchivedError
from tiered_checkpoint_io.inventory.durable import DurableCheckpoint, checkpoints, latest, read
from tiered_checkpoint_io.inventory.roots import tier_at
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content
from tiered_checkpoint_io.stores import Store, place_of


class Tier(str, Enum):
    """Which tier to look at."""

    memory = "memory"
    durable = "durable"


_Parts = Sequence[tuple[MemoryTier, StoredPart]]
_WORDS = {"intact": "intact", "changed": "changed", "newer": "NEWER", "damaged": "DAMAGED"}
_WHY = {"changed": "removed or overwritten while it was read", "newer": "it needs a newer release"}


def verify(
    dirpath: Annotated[
        str | None, typer.Argument(help="The durable tier; without it, only this node's memory is read.")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="One checkpoint, or tiered:latest; all by default.")] = None,
    tier: Annotated[Tier | None, typer.Option(help="Only this tier; both by default.")] = None,
    nodes: Nodes = NODES,
    server: Server = SERVER,
    json: Json = False,
) -> None:
    """Reads checkpoints and compares every byte with its hash: on the durable tier, and in this node's memory.

    In memory: this node's own parts, replicas of other nodes' parts, and the spill; with DIRPATH, those that belong to
    it. Names the file, the tier and the rank of what is damaged. Changes nothing. Exit status 1 where anything is
    damaged.
    """
    if dirpath is None and tier is Tier.durable:
        raise typer.BadParameter("--tier durable needs DIRPATH")
    config = server.config(dirpath) if dirpath is not None else None
    wanted = name_of(config, name) if config is not None and name is not None else None
    rows: list[Checked] = []
    asks = config is not None and tier is not Tier.memory

    def report(row: Checked) -> None:
        rows.append(row)
        if not json:
            say(_line(row))

    looks = tier is not Tier.durable and (nodes.is_named or has_memory(nodes.memory_dir))
    tiers = [tier_at(each) for each in nodes.paths()] if looks else []
    held: _Parts = [(each, stored) for each in tiers for stored in each.held()]
    found: list[DurableCheckpoint] | None = None
    if config is not None:
        place = place_of(config)
        held = [(each, stored) for each, stored in held if stored.part.place == place]
        tiers = [each for each in tiers if each.place == place]
        if wanted == ids.LATEST:
            found = ask(config, lambda store: _look(store, None, held)) if asks else []
            held, found = _latest(held, found)
        elif wanted is not None:
            held = [(each, stored) for each, stored in held if stored.part.name == wanted]
    _check_memory(tiers if wanted is None else [], held, report, silent=json)
    if config is not None and asks:

        def check(store: Store) -> None:
            _check_durable(store, _look(store, wanted, held) if found is None else found, report, silent=json)

        ask(config, check)
    if not rows:
        # Exit status 0 would look as if something had been verified.
        text = f"no such checkpoint: {wanted}" if wanted is not None else "no checkpoint to verify"
        where = config.dirpath if config is not None else nodes.memory_dir
        hint = "list what is there: tiered-ckpt ls, and tiered-ckpt status"
        raise CheckpointNotFoundError(text, operation="verify", tier=tier.value if tier else None, key=where, hint=hint)
    good = all(row.is_good for row in rows)
    if json:
        write_json("verify", Verified(dirpath, good, rows))
    raise typer.Exit(0 if good else 1)


def _look(store: Store, wanted: str | None, held: Sequence[object]) -> list[DurableCheckpoint]:
    """What the durable tier has of a name, or in all; nothing at the dirpath is no error where memory has something."""
    if wanted is not None:
        return [each for each in [read(store, wanted)] if each.is_there]
    try:
        return checkpoints(store)
    except CheckpointNotFoundError:
        if held:
            return []
        raise


def _latest(held: _Parts, found: Sequence[DurableCheckpoint]) -> tuple[_Parts, list[DurableCheckpoint]]:
    """The copies of the checkpoint that a restart on this node would take.

    Raises:
        FormatVersionError: A newer release wrote what may be the latest; a restart is refused as well.
    """
    meant = latest(found, (stored for _, stored in held))
    if meant is None:
        return [], []
    return (
        [(tier, stored) for tier, stored in held if stored.save_id == meant.save_id],
        [each for each in found if meant.durable is not None and each.name == meant.name],
    )


def _check_memory(tiers: Sequence[MemoryTier], held: _Parts, report: Report, *, silent: bool) -> None:
    with progress("memory", sum(stored.part.content.size for _, stored in held), silent=silent) as meter:
        for tier, stored in held:
            report(check_part(tier, stored, meter))
    for tier in tiers:
        for row in unreadable(tier):
            report(row)


def _check_durable(store: Store, found: Sequence[DurableCheckpoint], report: Report, *, silent: bool) -> None:
    sizes = {each.manifest.content.save_id: each.manifest.settled.size for each in found if each.manifest is not None}
    known: dict[str, Content | Damage] = {}
    with progress("durable tier", sum(sizes.values()), silent=silent) as meter:
        for each in found:
            report(_checked(store, each, known, meter))


def _checked(store: Store, each: DurableCheckpoint, known: dict[str, Content | Damage], meter: Meter) -> Checked:
    """Reads one checkpoint, of an alias its target; a save that has several names is read once."""
    name = each.name
    target = read(store, each.manifest.alias_of) if each.manifest is not None and each.manifest.alias_of else each
    manifest, error = (target.manifest, target.error) if target.is_there else (each.manifest, None)
    if manifest is None:
        # What can't be read is not known to be damaged, nor to be intact.
        state: CopyState = "newer" if isinstance(error, FormatVersionError) else "damaged"
        return Checked(name, "durable", state, error=str(error))
    save_id = manifest.content.save_id
    if save_id not in known:
        try:
            known[save_id] = content_or_damage(store, manifest, meter.add)
        except StoreArchivedError as archived:
            # That of the others can be read all the same.
            known[save_id] = Damage(str(archived))
    damage = known[save_id]
    content = manifest.settled if isinstance(damage, Damage) else damage
    row = Checked(name, "durable", "intact", step=ids.known(content.step), size_bytes=content.size)
    if not isinstance(damage, Damage):
        return row
    if read(store, manifest.name).manifest != manifest:
        return replace(row, state="changed")
    return replace(row, state="damaged", rank=damage.rank, file=damage.file or None, error=damage.error)


def _line(row: Checked) -> str:
    """A row for people."""
    rank = f" rank {row.rank}" if row.rank is not None else ""
    copy = f" ({row.copy})" if row.copy not in (None, "own") else ""
    why = _WHY.get(row.state, "")
    error = f"{row.file}: {row.error}" if row.file else row.error
    said = ": ".join(filter(None, (why, error)))
    return printable(f"{_WORDS[row.state]:<9}{row.tier:<9}{row.name}{rank}{copy}{': ' if said else ''}{said}")
