"""Placement of replicas: pure functions choose the rank that keeps each part, by the ranks' nodes.

Nodes form cliques, as NVRx has them: with a factor of 2, nodes 0 and 1 keep each other's parts, then 2 and 3.
If the number of nodes does not allow cliques of equal size, the nodes form a ring: each keeps copies for as many others
as any other does.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered_checkpoint_io.errors import ConfigError


def peers_of_ranks(nodes: Sequence[str], *, factor: int) -> list[tuple[int, ...]]:
    """Returns the ranks that keep copies of each rank's parts, by rank.

    A rank's copies go to ``factor - 1`` other nodes, no two of them to the same one, and never to its own.
    The k-th rank of a node sends to the k-th rank of its peers, as far as they have so many.

    Args:
        nodes: The machine of each rank, by rank: its memory is lost as a whole, with that of all its containers.
        factor: Number of nodes for each part, the rank's own included.

    Raises:
        ConfigError: There are fewer machines than copies, so that two copies would be on the same one.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    if len(ranks) < factor:
        raise ConfigError(
            f"replication_factor is {factor}, but the {len(nodes)} ranks are on {len(ranks)} machine(s): copies on the"
            " same machine would be lost with it",
            operation="replicate",
            hint=f"use {factor} machines or more (containers on one count as one), or lower replication_factor",
        )
    order = list(ranks)
    peers: list[tuple[int, ...]] = [()] * len(nodes)
    for own, others in zip(order, node_peers(len(order), factor=factor), strict=True):
        for position, rank in enumerate(ranks[own]):
            there = (ranks[order[other]] for other in others)
            peers[rank] = tuple(each[position % len(each)] for each in there)
    return peers


def sender_of(part: int, node: str, nodes: Sequence[str]) -> int:
    """Returns the rank that sends its peers a part which a node holds: the part's own rank, if it runs there. If ranks
    have moved to other nodes, or are fewer than before, the node's ranks share the remaining parts.

    Args:
        part: The part's number.
        node: The memory of some rank.
        nodes: The memory of each rank, by rank.
    """
    here = [rank for rank, each in enumerate(nodes) if each == node]
    return part if part in here else here[part % len(here)]


def node_peers(count: int, *, factor: int) -> list[tuple[int, ...]]:
    """Returns the nodes that keep copies for each of ``count`` nodes; each node keeps ``factor - 1``.

    Args:
        count: Number of nodes; ``factor`` or more.
        factor: See :func:`peers_of_ranks`.
    """
    if count % factor == 0:
        # Each begins with the next of its clique, so that no member is the first choice of all others.
        return [tuple(node - node % factor + (node + k) % factor for k in range(1, factor)) for node in range(count)]
    # The same distances from every node make the load even.
    return [tuple((node + k) % count for k in range(1, factor)) for node in range(count)]
