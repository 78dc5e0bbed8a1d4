"""Bytes of a checkpoint that lies in memory, from the nodes that hold them to those that need them.

What DCP saves once (replicated tensors, plain objects) lies on one node, and after a change of the
world size, or the loss of a node, shards do as well. The ranks tell each other what they lack, agree
on a list of transfers, and carry it out in its order, so that no two of them wait for each other. A
chunk travels once to each node that needs it. It is verified before it is sent, and again where it
arrives. What does not arrive as it should goes round once more, from another node that holds it, for
as long as there is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tiered_checkpoint_io.engine.chunks import Span, chunks_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, agree
from tiered_checkpoint_io.engine.ranks.transfer import GroupChannel, receive_chunk, send_chunk
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.errors import CorruptCheckpointError, LostRankError
from tiered_checkpoint_io.model.manifest import FileEntry


@dataclass(frozen=True, slots=True)
class ShardNeed:
    """What one rank tells the others: where it is, what its node's memory holds, and which spans of others it needs."""

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
    needs: Sequence[ShardNeed], without: Collection[tuple[str, int]] = ()
) -> tuple[dict[str, FileEntry], list[Transfer]]:
    """The files that are concerned, and what has to travel, in the order in which all ranks do it; pure.

    A file that no node holds is left out: reading it raises. So is a node of which some rank lacks a file that others
    there hold: it is one file, in which that rank has found damage.

    Args:
        needs: Of each rank, by rank.
        without: Files, and the ranks that are not to send them.
    """
    holders: dict[str, list[tuple[int, FileEntry]]] = {}
    leaders: dict[str, int] = {}
    damaged = {(need.node, basename) for need in needs for basename in need.lacks}
    for rank, need in enumerate(needs):
        leaders.setdefault(need.node, rank)
        for basename, entry in need.holds.items():
            if (basename, rank) not in without and (need.node, basename) not in damaged:
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
            chunks = chunks_of(entries[basename], spans)
            load[chosen[basename]] += len(chunks)
            wanted |= {Transfer(basename, index, chosen[basename], leaders[need.node]) for index in chunks}
    return entries, sorted(wanted)


def exchange(group: Group, files: ShardFiles, spans: Mapping[str, list[Span]]) -> list[str]:
    """Fetches what this node lacks from the memory of others; every rank of ``group`` calls this.

    Args:
        group: The ranks that load together, which all raise where one does.
        files: The checkpoint, as this rank sees it.
        spans: What this rank needs of each file, by basename.

    Returns:
        What did not arrive here as it should, and came from elsewhere, or is to come from the durable tier.

    Raises:
        TieredCheckpointError: Some rank failed.
    """
    for basename in spans.keys() & files.held.keys():
        # What is damaged here comes from elsewhere.
        with suppress(CorruptCheckpointError):
            files.verified(basename, spans[basename])
    without, notes = set[tuple[str, int]](), list[str]()
    #: What has come to this node, and what has not, though others have it.
    done, failed = set[str](), set[str]()
    while True:
        held = files.held
        lacks = {name: wanted for name, wanted in spans.items() if name not in held and name not in done}
        entries, planned = transfers(group.all_gather(ShardNeed(group.node, lacks, held)), without)
        if not planned:
            break
        concerned = lacks.keys() & entries.keys()
        # The lowest rank of a node receives what the others there lack, too.
        for basename in concerned | {each.basename for each in planned if each.target == group.rank}:
            files.expect(entries[basename])
        missed = _carry(group, files, entries, planned)
        notes += missed.values()
        gathered: list[tuple[str, list[tuple[str, int]], bool]] = group.all_gather(
            (group.node, list(missed), files.is_aside)
        )
        # Each round leaves out one more source of a file at least, so there is an end to it.
        without.update(miss for _, theirs, _ in gathered for miss in theirs)
        failed = failed - concerned | {name for node, theirs, _ in gathered if node == group.node for name, _ in theirs}
        if any(is_aside for node, _, is_aside in gathered if node == group.node):
            # Memory had no room for it: it is where this rank would not look.
            files.step_aside()
        done |= concerned - failed
    for basename in failed:
        # What the durable tier has is read from there; of the rest, reading says so.
        files.forget(basename)
    return notes


def share_reads(group: Group, files: ShardFiles, spans: Mapping[str, list[Span]]) -> None:
    """Tells the ranks of each node which chunks of the durable tier several of them read; every rank calls this.

    Raises:
        TieredCheckpointError: Some rank failed.
    """
    mine, error = dict[str, list[int]](), None
    try:
        mine = files.chunks_of(spans)
    except Exception as caught:
        error = caught
    agree(group, error)
    gathered: list[tuple[str, dict[str, list[int]]]] = group.all_gather((group.node, mine))
    others: defaultdict[str, set[int]] = defaultdict(set)
    for rank, (node, theirs) in enumerate(gathered):
        if node == group.node and rank != group.rank:
            for basename, indices in theirs.items():
                others[basename].update(indices)
    files.share(others)


def _carry(
    group: Group, files: ShardFiles, entries: Mapping[str, FileEntry], planned: Sequence[Transfer]
) -> dict[tuple[str, int], str]:
    """Carries out the transfers.

    Returns:
        The files of which something did not arrive here as it should, each with the rank that sent it, and why.

    Raises:
        TieredCheckpointError: Some rank has no place for what arrived.
    """
    missed: dict[tuple[str, int], str] = {}
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
            except CorruptCheckpointError as error:
                missed.setdefault((basename, transfer.source), str(error))
            except Exception as error:
                failed = failed or error
    agree(group, failed)
    return missed
