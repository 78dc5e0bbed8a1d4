"""Which checkpoint to restore, and from where: a pure function of what the tiers hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Manifest, newest_first

#: Where a node has a checkpoint from: its own memory (its own parts, and copies that it keeps for others), the
#: memory of another node, or the durable tier.
Tier = Literal["memory", "peer", "durable"]


@dataclass(frozen=True, slots=True)
class Selector:
    """What to restore.

    Attributes:
        kind: ``latest``: the newest of all that training can resume from; ``last``: the newest such that is called
            "last"; ``name``: the newest of one name; ``best``: the one with the best monitored value.
        name: For ``name``.
        monitor: For ``best``: which value.
        mode: For ``best``: which end of it is the best.
        step: For ``latest``: only checkpoints of this training step, where it is given.
        companion: Where it is given, ``x.ckpt`` counts only together with ``x<companion>.ckpt`` of the same
            step, which is never meant by itself.
    """

    kind: Literal["latest", "last", "name", "best"]
    name: str = ""
    monitor: str = ""
    mode: Literal["min", "max"] = "min"
    step: int | None = None
    companion: str = ""

    def wants(self, name: str) -> bool:
        """Whether a checkpoint of this name is meant, or may be."""
        if self.step is not None and ids.step_in_name(name) not in (None, self.step):
            return False
        if self.kind in ("latest", "best"):
            return True
        if self.kind == "last":
            return ids.is_last(name)
        return name == self.name

    def takes(self, content: Content) -> bool:
        """Whether it serves: what is asked for by its name or value may be there to be evaluated, not resumed from."""
        return content.resumable or self.kind in ("name", "best")

    def in_order(self, contents: Iterable[Content]) -> list[Content]:
        """Those that are meant, the first to be tried first: the best, or the latest."""
        # A companion is not resumed from by itself; what it belongs to is looked at together with it.
        wanted = (each for each in contents if self.companion or self.takes(each))
        latest = newest_first(each for each in wanted if self.step in (None, each.step))
        if self.kind != "best":
            return latest
        earliest = reversed(latest)
        rated = [(each.metric.value, each) for each in earliest if each.metric and each.metric.monitor == self.monitor]
        # Of equals the earliest, as ModelCheckpoint has it: the sort is stable. What is not a number is the worst.
        sign = 1 if self.mode == "min" else -1
        ordered = sorted(rated, key=lambda pair: math.inf if math.isnan(pair[0]) else sign * pair[0])
        return [content for _, content in ordered]


@dataclass(frozen=True, slots=True)
class Held:
    """A complete checkpoint in the memory of a node.

    Attributes:
        name: Its name.
        content: What it holds.
        owns: Whether it is this node's own, which the node brings to the durable tier where it is to go there.
    """

    name: str
    content: Content
    owns: bool = True


@dataclass(frozen=True, slots=True)
class Candidate:
    """One save that every node can get.

    Attributes:
        name: The checkpoint's name.
        content: What it holds.
        sources: For each node, the tiers to try, in order.
        orphaned: Whether there are only copies of it left, and it is not on the durable tier.
    """

    name: str
    content: Content
    sources: Mapping[str, tuple[Tier, ...]]
    orphaned: bool = False


def candidates(
    memory: Mapping[str, Sequence[Held]],
    durable: Sequence[Manifest],
    selector: Selector,
    aliases: Mapping[str, str] | None = None,
) -> list[Candidate]:
    """The saves to try.

    Args:
        memory: What each node's memory holds; a key for every node.
        durable: Manifests of the durable tier.
        selector: What is wanted.
        aliases: Aliases that are queued but not yet on the durable tier, and their targets.

    Returns:
        In the selector's order; each node can get them from its own memory, from another node's, or from the
        durable tier.
    """
    wanted = {target for alias, target in (aliases or {}).items() if selector.wants(alias)}
    found: dict[str, tuple[str, Content]] = {}
    on_durable: set[str] = set()
    for name, content in durable_contents(durable, selector, wanted):
        on_durable.add(content.save_id)
        found.setdefault(content.save_id, (name, content))
    for held in memory.values():
        for entry in held:
            if selector.wants(entry.name) or entry.name in wanted:
                found.setdefault(entry.content.save_id, (entry.name, entry.content))
    made = []
    for content in selector.in_order(content for _, content in found.values()):
        save_id, name = content.save_id, found[content.save_id][0]
        mine = [(node, e) for node, held in memory.items() for e in held if e.content.save_id == save_id]
        holders = {node for node, _ in mine}
        sources: dict[str, tuple[Tier, ...]] = {}
        for node in memory:
            tiers: list[tuple[Tier, bool]] = [("memory", node in holders), ("peer", bool(holders - {node}))]
            sources[node] = tuple(tier for tier, has in (*tiers, ("durable", save_id in on_durable)) if has)
        orphaned = save_id not in on_durable and not any(entry.owns for _, entry in mine)
        made.append(Candidate(name, content, sources, orphaned))
    if not selector.companion or selector.kind == "name":
        return made
    return [each for each in _complete(made, selector.companion) if selector.takes(each.content)]


def _complete(made: Sequence[Candidate], companion: str) -> list[Candidate]:
    """Those whose companion is there too; a companion by itself is none."""
    there = {(each.name, each.content.step) for each in made}
    return [
        each
        for each in made
        if not ids.is_companion(each.name, companion)
        and (ids.companion_of(each.name, companion), each.content.step) in there
    ]


def durable_contents(
    durable: Sequence[Manifest], selector: Selector, wanted: set[str]
) -> Iterable[tuple[str, Content]]:
    """What the wanted manifests may stand for: names, and contents that their objects may hold.

    Args:
        durable: Manifests, among them the targets of aliases.
        selector: Which are wanted.
        wanted: Names that are wanted as well.
    """
    by_name = {manifest.name: manifest for manifest in durable}
    for manifest in durable:
        if not (selector.wants(manifest.name) or manifest.name in wanted):
            continue
        # An alias follows its target, which may have been overwritten; it stands for itself only
        # where the target is gone.
        target = by_name.get(manifest.alias_of or "", manifest)
        for content in (target.content, *target.previous):
            yield target.name, content


def spread(holders: Sequence[int], lacking: Sequence[int]) -> list[tuple[int, int]]:
    """Who sends a whole checkpoint to whom, in the order in which all ranks do it.

    Those that have received it send it on, so that as many are sending at once as have it.

    Args:
        holders: Ranks that have it.
        lacking: Ranks that need it.
    """
    have, planned, rest = list(holders), [], list(lacking)
    while rest:
        turn = list(zip(have, rest, strict=False))
        planned += turn
        have += [target for _, target in turn]
        rest = rest[len(turn) :]
    return planned
