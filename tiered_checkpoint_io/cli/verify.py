"""The command that reads checkpoints of both tiers, and compares every byte with its hash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Literal

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.options import Address, AnyDirpath, Name, Nodes, Output, name_of
from tiered_checkpoint_io.cli.output import Columns, progress, row_writer, write_json
from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.drain.stores import tier_at
from tiered_checkpoint_io.engine.durable.damage import Damage, content_or_damage
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    is_other_format,
)
from tiered_checkpoint_io.inventory.durable import DurableCheckpoint, checkpoints, read, resumable
from tiered_checkpoint_io.memory.parts import StoredPart, reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content
from tiered_checkpoint_io.stores import Store, place_of

#: ``newer``: it needs a newer release; ``changed``: removed or overwritten while it was read; ``gone``: files deleted.
CopyState = Literal["intact", "damaged", "newer", "changed", "gone"]


@dataclass(frozen=True, slots=True)
class Checked:
    """A copy of a checkpoint, or a part of one, after its bytes were read."""

    #: For an unreadable one, the folder or key.
    name: str
    tier: Literal["memory", "durable"]
    state: CopyState
    #: The rank of the part, or of the damaged file; None for all of them.
    rank: int | None = None
    copy: Literal["own", "replica", "spill"] | None = None
    file: str | None = None
    error: str | None = None
    step: int | None = None
    size_bytes: int = 0

    @property
    def is_good(self) -> bool:
        """True if the checkpoint has no defect."""
        return self.state in ("intact", "changed")


Report = Callable[[Checked], None]


class Tier(str, Enum):
    """Tier to look at."""

    memory = "memory"
    durable = "durable"


_Parts = Sequence[tuple[MemoryTier, StoredPart]]


@dataclass(frozen=True, kw_only=True)
class Verify(Output, Address, Nodes):
    """Reads checkpoints of both tiers, and compares every byte with its hash.

    In memory: this node's own parts, replicas of other nodes' parts, and the spill; with DIRPATH, those that belong to
    it. Names the file, the tier and the rank of any damage, and changes nothing. The exit status is 1 if anything is
    damaged.
    """

    dirpath: AnyDirpath = None
    name: Name = None
    tier: Annotated[Tier | None, typer.Option(help="Only this tier; both by default.")] = None

    def run(self) -> None:
        """Prints a row for each copy or part; the status is 1 if one is damaged."""
        if self.dirpath is None and self.tier is Tier.durable:
            raise typer.BadParameter("--tier durable needs DIRPATH")
        config = self.config(self.dirpath) if self.dirpath is not None else None
        wanted = name_of(config, self.name) if config is not None and self.name is not None else None
        rows: list[Checked] = []
        write = row_writer(_COLUMNS, 8, 7, 40, 4, 7, 4)

        def report(row: Checked) -> None:
            rows.append(row)
            if not self.as_json:
                write(row)

        asks = config is not None and self.tier is not Tier.memory
        looks = self.tier is not Tier.durable and (self.namespace is not None or self.has_memory)
        tiers = [tier_at(each) for each in self.roots()] if looks else []
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
        _check_memory(tiers if wanted is None else [], held, report, silent=self.as_json)
        if config is not None and asks:

            def check(store: Store) -> None:
                there = _look(store, wanted, held) if found is None else found
                check_durable(store, there, report, silent=self.as_json)

            ask(config, check)
        if not rows:
            # Exit status 0 would look as if something had been verified.
            raise CheckpointNotFoundError(
                f"no such checkpoint: {wanted}" if wanted is not None else "no checkpoint to verify",
                operation="verify",
                tier=self.tier.value if self.tier else None,
                key=config.dirpath if config is not None else self.memory_dir,
                hint="list what is there: tiered-ckpt ls, and tiered-ckpt status",
            )
        good = all(row.is_good for row in rows)
        if self.as_json:
            write_json("verify", {"dirpath": self.dirpath, "intact": good, "checkpoints": rows})
        raise typer.Exit(0 if good else 1)


def _look(store: Store, wanted: str | None, held: Sequence[object]) -> list[DurableCheckpoint]:
    """Returns the durable tier's checkpoints, or those of a name; none at all is no error if memory has something."""
    if wanted is not None:
        return [each for each in [read(store, wanted)] if each.is_there]
    try:
        return checkpoints(store)
    except CheckpointNotFoundError:
        if held:
            return []
        raise


def _latest(held: _Parts, found: Sequence[DurableCheckpoint]) -> tuple[_Parts, list[DurableCheckpoint]]:
    """Returns the copies of the checkpoint that a restart on this node would take.

    Raises:
        CorruptCheckpointError: A newer release wrote a checkpoint that may be the latest; a restart is refused as well.
    """
    meant = next(iter(resumable(found, (stored for _, stored in held))), None)
    if meant is None:
        return [], []
    return (
        [(tier, stored) for tier, stored in held if stored.save_id == meant.save_id],
        [each for each in found if meant.durable is not None and each.name == meant.name],
    )


def check_part(tier: MemoryTier, stored: StoredPart, count: Callable[[int], None]) -> Checked:
    """Reads a part in memory; one that was removed meanwhile is not damaged."""
    part = stored.part
    copy: Literal["own", "replica", "spill"] = (
        "replica" if stored.is_replica else "spill" if tier.is_spilled(stored.folder) else "own"
    )

    def checked(state: CopyState, file: str | None = None, error: str | None = None) -> Checked:
        step, size = ids.known(part.content.step), part.content.size
        return Checked(part.name, "memory", state, part.rank, copy, file, error, step, size)

    try:
        with reading(stored) as views:
            for entry in part.content.files:
                where = str(stored.file(entry.basename))
                chunks.verify(entry, views[entry.basename], where=where, progress=count)
    except CheckpointNotFoundError:
        return checked("changed")
    except CorruptCheckpointError as error:
        return checked("damaged", error.key, error.message)
    return checked("intact")


def _check_memory(tiers: Sequence[MemoryTier], held: _Parts, report: Report, *, silent: bool) -> None:
    count = progress("memory", sum(stored.part.content.size for _, stored in held), silent=silent)
    for tier, stored in held:
        report(check_part(tier, stored, count))
    for tier in tiers:
        for folder, error in tier.unreadable():
            state: CopyState = "newer" if is_other_format(error) else "damaged"
            report(Checked(str(folder), "memory", state, error=str(error)))


def check_durable(store: Store, found: Sequence[DurableCheckpoint], report: Report, *, silent: bool) -> None:
    sizes = {each.manifest.content.save_id: each.manifest.settled.size for each in found if each.manifest is not None}
    known: dict[str, Content | Damage] = {}
    count = progress("durable tier", sum(sizes.values()), silent=silent)
    for each in found:
        report(_checked(store, each, known, count))


def _checked(
    store: Store, each: DurableCheckpoint, known: dict[str, Content | Damage], count: Callable[[int], None]
) -> Checked:
    """Reads one checkpoint, of an alias its target; a save that has several names is read once."""
    name = each.name
    each = read(store, name) if isinstance(each.error, StoreNotFoundError) else each
    target = read(store, each.manifest.alias_of) if each.manifest is not None and each.manifest.alias_of else each
    manifest, error = (target.manifest, target.error) if target.is_there else (each.manifest, None)
    if manifest is None:
        # A checkpoint that can't be read is not known to be damaged, nor to be intact.
        state: CopyState = "newer" if is_other_format(error) else "damaged" if error is not None else "changed"
        return Checked(name, "durable", state, error=str(error or ""))
    save_id = manifest.content.save_id
    if save_id not in known:
        try:
            known[save_id] = content_or_damage(store, manifest, count)
        except StoreError as archived:
            if archived.reason != "archived":
                raise
            # Other checkpoints can still be read.
            known[save_id] = Damage(str(archived))
    damage = known[save_id]
    content = manifest.settled if isinstance(damage, Damage) else damage
    row = Checked(name, "durable", "intact", step=ids.known(content.step), size_bytes=content.size)
    if not isinstance(damage, Damage):
        return row
    if read(store, manifest.name).manifest != manifest:
        return replace(row, state="changed")
    damaged: CopyState = "gone" if damage.is_gone else "damaged"
    return replace(row, state=damaged, rank=damage.rank, file=damage.file or None, error=damage.error)


def _note(row: Checked) -> str:
    error = f"{row.file}: {row.error}" if row.file else row.error
    return ": ".join(filter(None, (_WHY.get(row.state, ""), error)))


_WORDS = {"newer": "NEWER", "damaged": "DAMAGED", "gone": "GONE"}
_WHY = {"changed": "removed or overwritten while it was read", "newer": "it needs a newer release"}
_COLUMNS: Columns = {
    "state": lambda row: _WORDS.get(row.state, row.state),
    "tier": "tier",
    "name": "name",
    "rank": "rank",
    "copy": "copy",
    "note": _note,
}
