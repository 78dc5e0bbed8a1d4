"""Which sharded checkpoint to load: a pure function of what the nodes and the durable tier hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.engine.restore.choice import Selector, durable_contents
from tiered_checkpoint_io.model.manifest import Content, Manifest


@dataclass(frozen=True, slots=True)
class HeldPart:
    """One rank's part in the memory of a node.

    Attributes:
        name: The checkpoint's name.
        rank: The rank that saved it.
        commits: Whether it holds ``.metadata``.
        content: The rank's files, without their hashes.
        owns: Whether it is this node's own, and not a copy that it keeps for another one.
    """

    name: str
    rank: int
    commits: bool
    content: Content
    owns: bool = True


@dataclass(frozen=True, slots=True)
class ShardCandidate:
    """One save whose bytes are all somewhere.

    Attributes:
        name: The checkpoint's name.
        content: The facts of the save; its files are all there are only where ``durable`` is set.
        durable: What its manifest on the durable tier says; None where it is not there.
        metadata_nodes: Nodes whose memory holds ``.metadata``, of a save that is whole in memory.
    """

    name: str
    content: Content
    durable: Content | None
    metadata_nodes: tuple[str, ...]

    @property
    def save_id(self) -> str:
        return self.content.save_id


def shard_candidates(
    memory: Mapping[str, Sequence[HeldPart]],
    durable: Sequence[Manifest],
    selector: Selector,
    rejected: Collection[str] = (),
) -> list[ShardCandidate]:
    """The saves to try, in the selector's order.

    A save counts as whole in memory if the parts of all its ranks are found, over all nodes.

    Args:
        memory: What each node's memory holds; a key for every node.
        durable: Manifests of the durable tier.
        selector: What is wanted.
        rejected: Saves that turned out to be damaged.
    """
    found: dict[str, ShardCandidate] = {}
    ranks: dict[str, set[int]] = {}
    metadata: dict[str, list[str]] = {}
    facts: dict[str, HeldPart] = {}
    for node, parts in memory.items():
        for part in parts:
            save_id = part.content.save_id
            ranks.setdefault(save_id, set()).add(part.rank)
            if part.commits:
                metadata.setdefault(save_id, []).append(node)
                facts[save_id] = part
    on_durable = {
        content.save_id: (name, content)
        for name, content in durable_contents(durable, selector, set())
        if content.kind == "sharded"
    }
    for save_id, part in facts.items():
        if selector.wants(part.name) and ranks[save_id] >= set(range(part.content.world_size)):
            _, content = on_durable.get(save_id, (part.name, None))
            found[save_id] = ShardCandidate(part.name, part.content, content, tuple(metadata[save_id]))
    for save_id, (name, content) in on_durable.items():
        found.setdefault(save_id, ShardCandidate(name, content, content, ()))
    ordered = selector.in_order(candidate.content for candidate in found.values())
    return [found[content.save_id] for content in ordered if content.save_id not in rejected]
