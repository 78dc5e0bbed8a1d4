"""One row for each checkpoint, from what the tiers hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiered_checkpoint_io.engine.drain.operations import NAMING
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.errors import FormatVersionError
from tiered_checkpoint_io.inventory.durable import DurableCheckpoint, IncompleteSave, latest, newer
from tiered_checkpoint_io.inventory.node import BrokenPart, HeldPart, NodeMemory
from tiered_checkpoint_io.inventory.record import CheckpointInfo, CheckpointState, Tier, info, time_of, url_of
from tiered_checkpoint_io.model.manifest import Content, Manifest
from tiered_checkpoint_io.model.place import Place

_NOT_KNOWN = "this node can't tell whether it is durable; the durable tier can, where DIRPATH is given and it answers"


@dataclass(frozen=True, slots=True)
class DurableTier:
    """What a look at a durable tier found: names with a manifest, and saves without one."""

    found: Sequence[DurableCheckpoint] = ()
    incomplete: Sequence[IncompleteSave] = ()

    @property
    def manifests(self) -> list[Manifest]:
        return [each.manifest for each in self.found if each.manifest is not None]


def checkpoints_of(place: Place, durable: DurableTier | None, node: NodeMemory) -> list[CheckpointInfo]:
    """All checkpoints of one durable tier, the latest save first; what can't be read is last.

    Args:
        place: The durable tier.
        durable: What it holds; None where it was not asked, or did not answer.
        node: What this node's memory holds, of any durable tier.
    """
    node = node.at(place)
    asked = durable is not None
    durable = durable or DurableTier()
    saves: dict[str, list[HeldPart]] = {}
    for each in node.held:
        saves.setdefault(each.stored.save_id, []).append(each)
    broken: dict[str, list[BrokenPart]] = {}
    for damage in node.broken:
        broken.setdefault(damage.save_id or str(damage.folder), []).append(damage)
    manifests = {each.name: each for each in durable.manifests}
    rows = [_durable_row(place, each, saves, broken, manifests) for each in durable.found]
    rows += [_overwriting_row(place, each, saves, node) for each in durable.manifests if _is_overwritten(each)]
    rows += _queued_rows(place, node, [*manifests.values()])
    seen = {row.save_id for row in rows if not row.alias_of}
    rows += [_incomplete_row(place, each, saves, node) for each in durable.incomplete if each.save_id not in seen]
    seen |= {row.save_id for row in rows if not row.alias_of}
    rows += [
        _memory_row(place, held, node, asked=asked, broken=broken) for save, held in saves.items() if save not in seen
    ]
    seen |= saves.keys()
    rows += [_broken_row(place, each) for save, them in broken.items() if save not in seen for each in them[:1]]
    meant = _latest(durable, node)
    return _in_order(
        replace(row, is_latest=meant is not None and not row.alias_of and row.save_id == meant.save_id) for row in rows
    )


def _latest(durable: DurableTier, node: NodeMemory) -> Candidate | None:
    """What a restart would take of all this, by the engine's own choice; None where it takes none, or is refused."""
    if newer(durable.found) is not None or any(each.is_newer for each in node.broken):
        # What a newer release wrote may be the latest.
        return None
    aliases = {each.name: each.target for each in node.waiting if each.action in NAMING}
    return latest(durable.found, (each.stored for each in node.held), aliases=aliases)


# ------------------------------------------------------------------------------------------ rows
def _durable_row(
    place: Place,
    each: DurableCheckpoint,
    saves: dict[str, list[HeldPart]],
    broken: dict[str, list[BrokenPart]],
    manifests: Mapping[str, Manifest],
) -> CheckpointInfo:
    manifest, dirpath = each.manifest, place.dirpath
    if manifest is None:
        state: CheckpointState = "newer_release" if isinstance(each.error, FormatVersionError) else "corrupt"
        url = url_of(dirpath, each.name)
        return CheckpointInfo(name=each.name, url=url, dirpath=dirpath, state=state, problem=str(each.error))
    # An alias follows its target, which may have been overwritten.
    content = manifests.get(manifest.alias_of or "", manifest).settled
    held = saves.get(content.save_id, [])
    return info(
        manifest.name,
        dirpath,
        content,
        state="durable",
        alias_of=manifest.alias_of,
        where=(*_tiers(held), "durable"),
        parts_here=_ranks(held),
        problem=_problem(broken.get(content.save_id, [])),
    )


def _is_overwritten(manifest: Manifest) -> bool:
    return bool(manifest.previous) and manifest.alias_of is None


def _overwriting_row(
    place: Place, manifest: Manifest, saves: dict[str, list[HeldPart]], node: NodeMemory
) -> CheckpointInfo:
    """What is about to take the place of the content that a name has."""
    before = f"step {manifest.settled.step}" if manifest.settled.step >= 0 else "the checkpoint before"
    problem = f"it takes the place of {before} once its upload is complete"
    return _begun_row(place, manifest.name, manifest.content, saves.get(manifest.content.save_id, []), node, problem)


def _queued_rows(place: Place, node: NodeMemory, manifests: Sequence[Manifest]) -> Iterable[CheckpointInfo]:
    """Aliases and copies that wait for the durable tier; an alias that is there already, and is to move, is one row."""
    contents = {manifest.name: manifest.content for manifest in manifests}
    committed = set(contents)
    contents |= {each.stored.part.name: each.stored.part.content for each in node.held}
    last = {each.name: each for each in node.waiting if each.action in NAMING}
    for name, request in last.items():
        content = contents.get(request.target)
        if content is None or name in committed:
            continue
        made = {"alias_of": request.target} if request.action == "alias" else {"copy_of": content.save_id}
        save_id = content.save_id if request.action == "alias" else request.op_id
        yield info(name, place.dirpath, content, state="waiting", **{**made, "save_id": save_id})


def _memory_row(
    place: Place, held: Sequence[HeldPart], node: NodeMemory, *, asked: bool, broken: dict[str, list[BrokenPart]]
) -> CheckpointInfo:
    """A save that this node's memory has, and that has no manifest as far as is known."""
    part, state = held[0].stored.part, _memory_state(held, node, asked=asked)
    return info(
        part.name,
        place.dirpath,
        part.content,
        state=state,
        where=_tiers(held),
        size_bytes=sum(each.stored.part.content.size for each in held),
        parts_here=_ranks(held),
        problem=_problem(broken.get(part.save_id, [])) or (_NOT_KNOWN if state == "incomplete" else ""),
    )


def _memory_state(held: Sequence[HeldPart], node: NodeMemory, *, asked: bool) -> CheckpointState:
    states = {each.state for each in held}
    if "waiting" in states:
        return "uploading" if held[0].stored.part.name in node.working_on else "waiting"
    if asked or "memory_only" in states:
        # The durable tier does not have it: it was never to, or it was removed there, or the upload was given up.
        return "memory_only"
    # Else others upload it, or commit it; they may have died before.
    return "durable" if "durable" in states else "incomplete"


def _incomplete_row(
    place: Place, each: IncompleteSave, saves: dict[str, list[HeldPart]], node: NodeMemory
) -> CheckpointInfo:
    held = saves.get(each.save_id, [])
    part = each.part or next((here.stored.part for here in held), None)
    count = f"{len(each.ranks)} of {part.content.parts} parts" if part is not None else f"{len(each.ranks)} parts"
    problem = f"{count} on the durable tier, and no manifest"
    if part is not None:
        return _begun_row(place, part.name, part.content, held, node, problem)
    return CheckpointInfo(
        name=f"save {each.save_id}",
        url=url_of(place.dirpath, ""),
        dirpath=place.dirpath,
        save_id=each.save_id,
        state="incomplete",
        where=("durable",),
        created=time_of(each.modified),
        problem=problem,
    )


def _begun_row(
    place: Place, name: str, content: Content, held: Sequence[HeldPart], node: NodeMemory, problem: str
) -> CheckpointInfo:
    """A save that has begun to arrive on the durable tier: from this node, or from others."""
    if any(each.stored.pending for each in held):
        row = _memory_row(place, held, node, asked=True, broken={})
        return replace(row, where=(*row.where, "durable"))
    return info(
        name,
        place.dirpath,
        content,
        state="incomplete",
        where=(*_tiers(held), "durable"),
        parts_here=_ranks(held),
        resumable=content.resumable and bool(held),
        problem=problem,
    )


def _broken_row(place: Place, each: BrokenPart) -> CheckpointInfo:
    state: CheckpointState = "newer_release" if each.is_newer else "corrupt"
    if each.part is not None:
        return info(each.part.name, place.dirpath, each.part.content, state=state, resumable=False, problem=each.why)
    name = str(each.folder)
    return CheckpointInfo(
        name=name, url=name, dirpath=place.dirpath, save_id=each.save_id, state=state, problem=each.why
    )


def _tiers(held: Sequence[HeldPart]) -> tuple[Tier, ...]:
    order: tuple[Tier, ...] = ("memory", "spill", "replicas")
    return tuple(tier for tier in order if any(each.tier == tier for each in held))


def _ranks(held: Sequence[HeldPart]) -> int:
    return len({each.stored.part.rank for each in held})


def _problem(broken: Sequence[BrokenPart]) -> str:
    return f"memory: {broken[0].why}" if broken else ""


def _in_order(rows: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The latest save first, aliases and copies after what they stand for, what can't be read last."""
    by_name = sorted(rows, key=lambda row: row.name)
    return sorted(by_name, key=lambda row: row.order, reverse=True)
