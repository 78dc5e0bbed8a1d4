"""Bytes of a checkpoint that lies in memory, from the nodes that hold them to those that need them.

What DCP saves once (replicated tensors, plain objects) lies on one node, and after a change of the
world size, or the loss of a node, shards do as well. The ranks tell each other what they lack, agree
on a list of transfers, and carry it out in its order, so that no two of them wait for each other. A
chunk travels once to each node that needs it. It is verified before it is sent, and again where it
arrives. What does not arrive as it should goes round once more, from another node that holds it, for
as long as there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tiered_checkpoint_io.engine.chunks import Span, chunks_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, agree
from tiered_checkpoint_io.engine.ranks.transfer import GroupChannel, receive_chunk, send_chunk
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.errors import CorruptCheckpointError, LostRankError
from tiered_checkpoint_io.model.manifest import FileEntry


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


def transfers(
    needs: Sequence[Need], without: Collection[tuple[str, int]] = ()
) -> tuple[dict[str, FileEntry], list[Transfer]]:
    """What has to travel, in the order in which all ranks do it; pure.

    A file that no node holds is left out: whoever needs it will say so.

    Args:
        needs: What each rank told, by rank.
        without: Files, and the ranks that are not to send them.

    Returns:
        The files that are concerned, and the transfers.
    """
    holders: dict[str, list[tuple[int, FileEntry]]] = {}
    leaders: dict[str, int] = {}
    for rank, need in enumerate(needs):
        leaders.setdefault(need.node, rank)
        for basename, entry in need.holds.items():
            if (basename, rank) not in without:
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


def exchange(group: Group, files: ShardFiles, spans: Mapping[str, list[Span]]) -> list[str]:
    """Fetches what this node lacks from the memory of others; every rank of ``group`` calls this.

    Args:
        group: The ranks that load together, which hear of it where one raises: see ``fail_together``.
        files: The checkpoint, as this rank sees it.
        spans: What this rank needs of each file, by basename.

    Returns:
        What did not arrive here as it should, and came from elsewhere, or is to come from the durable tier.

    Raises:
        TieredCheckpointError: Some rank failed, or no copy of something has arrived.
    """
    for basename, wanted in spans.items():
        # What is damaged here comes from elsewhere.
        files.check(basename, wanted)
    without, notes = set[tuple[str, int]](), list[str]()
    failed: dict[str, CorruptCheckpointError] = {}
    #: What has come to this node.
    done: set[str] = set()
    while True:
        held = files.held
        lacks = {name: wanted for name, wanted in spans.items() if name not in held and name not in done}
        entries, planned = transfers(group.all_gather(Need(group.node, lacks, held)), without)
        if not planned:
            break
        for basename in lacks.keys() & entries.keys():
            files.adopt(entries[basename])
            failed.pop(basename, None)
        missed = _carry(group, files, entries, planned)
        failed.update((basename, error) for (basename, _), error in missed.items())
        notes += map(str, missed.values())
        told: list[tuple[str, list[tuple[str, int]]]] = group.all_gather((group.node, list(missed)))
        # Each round leaves out one more source of a file at least, so there is an end to it.
        without.update(miss for _, theirs in told for miss in theirs)
        done |= lacks.keys() & entries.keys()
        done -= {basename for node, theirs in told if node == group.node for basename, _ in theirs}
    agree(group, _lost(files, failed))
    return notes


def _lost(files: ShardFiles, failed: Mapping[str, CorruptCheckpointError]) -> Exception | None:
    """Why the load cannot go on, where a file that did not arrive is not on the durable tier either."""
    try:
        # The durable tier is asked only where something did not arrive.
        return next((error for basename, error in failed.items() if not files.is_durable(basename)), None)
    except Exception as error:
        # The others wait to hear of it.
        return error


def _carry(
    group: Group, files: ShardFiles, entries: Mapping[str, FileEntry], planned: Sequence[Transfer]
) -> dict[tuple[str, int], CorruptCheckpointError]:
    """Carries out the transfers.

    Returns:
        The files of which something did not arrive here as it should, each with the rank that sent it, and why.

    Raises:
        TieredCheckpointError: Some rank has no place for what arrived.
    """
    missed: dict[tuple[str, int], CorruptCheckpointError] = {}
    failed: Exception | None = None
    for transfer in planned:
        basename, entry = transfer.basename, entries[transfer.basename]
        offset, length = entry.chunks[transfer.index]
        if transfer.source == group.rank:
            send_chunk(GroupChannel(group, transfer.target), partial(files.peek, basename, offset, length))
        elif transfer.target == group.rank:
            # Whatever fails here, the sender must get rid of its bytes, and of those that follow.
            chunk = memoryview(bytearray(length))
            try:
                receive_chunk(GroupChannel(group, transfer.source), entry, chunk)
                files.put(basename, transfer.index, chunk)
            except LostRankError:
                raise
            except CorruptCheckpointError as caught:
                missed.setdefault((basename, transfer.source), caught)
            except Exception as caught:
                failed = failed or caught
    agree(group, failed)
    return missed
