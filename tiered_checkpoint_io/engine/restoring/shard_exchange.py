"""Bytes of a checkpoint that lies in memory, from the nodes that hold them to those that need them.

What DCP saves once (replicated tensors, plain objects) lies on one node, and after a change of the
world size, or the loss of a node, shards do as well. The ranks tell each other what they lack, agree
on a list of transfers, and carry it out in its order, so that no two of them wait for each other. A
chunk travels once to each node that needs it. It is verified before it is sent, so that another copy
can be taken where one is damaged, and again where it arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiered_checkpoint_io.engine.ranks.carrying import hear, not_sent, tell, text_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, agree
from tiered_checkpoint_io.engine.restoring.shard_files import ShardFiles
from tiered_checkpoint_io.engine.restoring.shared_reads import Span, chunks_of
from tiered_checkpoint_io.errors import CorruptCheckpointError, LostRankError
from tiered_checkpoint_io.manifest import FileEntry


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank tells the others.

    Attributes:
        node: Where it is.
        lacks: Files that are not in its node's memory, and the ``(offset, length)`` spans it needs of them.
        holds: The files of this node's memory; of a node, its lowest rank alone tells them.
    """

    node: str
    lacks: Mapping[str, list[Span]] = field(default_factory=dict)
    holds: Mapping[str, FileEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One chunk, from a rank to the lowest rank of another node."""

    basename: str
    index: int
    source: int
    target: int


def transfers(needs: Sequence[Need]) -> tuple[dict[str, FileEntry], list[Transfer]]:
    """What has to travel, in the order in which all ranks do it; pure.

    A file that no node holds is left out: whoever needs it will say so.

    Args:
        needs: What each rank told, by rank.

    Returns:
        The files that are concerned, and the transfers.
    """
    holders: dict[str, list[tuple[int, FileEntry]]] = {}
    leaders: dict[str, int] = {}
    for rank, need in enumerate(needs):
        leaders.setdefault(need.node, rank)
        for basename, entry in need.holds.items():
            holders.setdefault(basename, []).append((rank, entry))
    wanted: set[Transfer] = set()
    entries: dict[str, FileEntry] = {}
    load: Counter[int] = Counter()
    chosen: dict[str, int] = {}
    for need in needs:
        for basename, spans in sorted(need.lacks.items()):
            if basename not in holders:
                continue
            if basename not in chosen:
                # Of several copies, that of the node which sends least so far.
                chosen[basename], entries[basename] = min(holders[basename], key=lambda each: (load[each[0]], each[0]))
            target = leaders[need.node]
            chunks = chunks_of(entries[basename], spans)
            load[chosen[basename]] += len(chunks)
            wanted |= {Transfer(basename, index, chosen[basename], target) for index in chunks}
    return entries, sorted(wanted)


def exchange(group: Group, files: ShardFiles, spans: Mapping[str, list[Span]]) -> None:
    """Brings what this node lacks from the memory of others; every rank of ``group`` calls this.

    Args:
        group: The ranks that load together, which hear of it where one raises: see ``together``.
        files: The checkpoint, as this rank sees it.
        spans: What this rank needs of each file, by basename.

    Raises:
        TieredCheckpointError: Some rank failed.
    """
    for basename, wanted in spans.items():
        # What is damaged here comes from elsewhere.
        files.check(basename, wanted)
    while True:
        need = Need(
            node=group.node,
            lacks={name: wanted for name, wanted in spans.items() if name not in files.held},
            holds=files.held,
        )
        needs: list[Need] = group.all_gather(need)
        entries, planned = transfers(needs)
        mine: dict[str, list[Span]] = {}
        for transfer in planned:
            if transfer.source == group.rank:
                offset, length = entries[transfer.basename].chunks[transfer.index]
                mine.setdefault(transfer.basename, []).append((offset, length))
        # Once transfers have begun, whoever sends must not wait for room here.
        scratch = memoryview(bytearray(_longest(entries, planned, group.rank)))
        damaged = [name for name, sent in mine.items() if files.check(name, sent) is not None]
        if not any(group.all_gather(damaged)):
            break
    failed: Exception | None = None
    spare = {basename for basename in entries if files.is_durable(basename)}
    for basename, entry in entries.items():
        if basename in need.lacks:
            files.adopt(entry)
    for transfer in planned:
        entry = entries[transfer.basename]
        offset, length = entry.chunks[transfer.index]
        if transfer.source == group.rank:
            chunk, problem = memoryview(b""), ""
            try:
                chunk = files.peek(transfer.basename, offset, length)
            except Exception as caught:
                problem = text_of(caught)
            tell(group, problem, transfer.target)
            if not problem:
                group.send(chunk, transfer.target)
        elif transfer.target == group.rank:
            # Whatever fails here, the sender must get rid of its bytes, and of those that follow.
            refused = hear(group, transfer.source)
            try:
                if refused:
                    raise not_sent(refused, entry, transfer.source)
                group.receive(scratch[:length], transfer.source)
                files.adopt(entry)
                files.put(transfer.basename, transfer.index, scratch[:length])
            except LostRankError:
                raise
            except CorruptCheckpointError as caught:
                if transfer.basename not in spare:
                    failed = failed or caught
            except Exception as caught:
                failed = failed or caught
    agree(group, failed)


def _longest(entries: Mapping[str, FileEntry], planned: Sequence[Transfer], rank: int) -> int:
    """Bytes of the longest chunk that a rank is to receive."""
    return max((entries[each.basename].chunks[each.index][1] for each in planned if each.target == rank), default=0)
