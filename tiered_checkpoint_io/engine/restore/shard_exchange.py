"""Bytes of a checkpoint that lies in memory, from the nodes that hold them to those that need them.

What DCP saves once (replicated tensors, plain objects) lies on one node, and after a change of the
world size, or the loss of a node, shards do as well. The ranks tell each other what they lack, and
the lowest ranks of the nodes send it to each other, see :mod:`rounds`. A chunk travels once to each
node that needs it. It is verified before it is sent, and again where it arrives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tiered_checkpoint_io.engine.chunks import Span, chunks_of, merged
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.rounds import Piece, Rounds, carry, in_pieces
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model.manifest import FileEntry


@dataclass(frozen=True, slots=True)
class ShardNeed:
    """What one rank tells the others: where it is, which spans of other nodes' files it needs, and what its node holds.

    The lowest rank of a node alone says the last, and leaves the hashes out: they grow with the checkpoint.
    """

    node: str
    lacks: Mapping[str, list[Span]] = field(default_factory=dict)
    holds: Mapping[str, FileEntry] = field(default_factory=dict)


def plan(needs: Sequence[ShardNeed], without: Collection[tuple[str, int]] = ()) -> tuple[dict[str, FileEntry], Rounds]:
    """The files that are concerned, and how they travel between the lowest ranks of nodes; pure.

    A file that no node holds is left out: reading it raises. So is a node of which some rank lacks a file that others
    there hold: it is one file, in which that rank has found damage.

    Args:
        needs: Of each rank, by rank.
        without: Files, and the ranks that are not to send them.
    """
    holders: dict[str, list[int]] = {}
    entries: dict[str, FileEntry] = {}
    leaders: dict[str, int] = {}
    damaged = {(need.node, basename) for need in needs for basename in need.lacks}
    for rank, need in enumerate(needs):
        leaders.setdefault(need.node, rank)
        for basename, entry in need.holds.items():
            if (basename, rank) not in without and (need.node, basename) not in damaged:
                holders.setdefault(basename, []).append(rank)
                entries.setdefault(basename, entry)
    wanted: dict[str, defaultdict[int, set[int]]] = {}
    for need in needs:
        for basename in need.lacks.keys() & entries.keys():
            ranks = wanted.setdefault(basename, defaultdict(set))
            for index in chunks_of(entries[basename], need.lacks[basename]):
                ranks[index].add(leaders[need.node])
    lacking = {name: {index: frozenset(ranks) for index, ranks in each.items()} for name, each in wanted.items()}
    return {name: entries[name] for name in wanted}, Rounds(holders, in_pieces(entries, lacking))


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
    leader = group.all_gather(group.node).index(group.node)
    without, notes = set[tuple[str, int]](), list[str]()
    #: What has come to this node, and what has not, though others have it.
    done, failed = set[str](), set[str]()
    #: The files that are concerned, with their hashes.
    entries = dict[str, FileEntry]()
    again = True
    while again:
        held = files.held
        lacks = {name: merged(wanted) for name, wanted in spans.items() if name not in held and name not in done}
        holds = {name: replace(entry, hashes=()) for name, entry in held.items()} if leader == group.rank else {}
        needs = group.all_gather(ShardNeed(group.node, lacks, holds))
        planned, rounds = plan(needs, without)
        if not planned:
            break
        # Made before an exchange: the others learn there that this rank has no room.
        shards = _Shards(files, entries, rounds.longest(group.rank))
        first = {name: rank for rank, need in reversed([*enumerate(needs)]) for name in need.holds}
        unknown = planned.keys() - entries.keys()
        entries |= group.combine({name: held[name] for name in unknown if first[name] == group.rank})
        concerned = lacks.keys() & planned.keys()
        # The lowest rank of a node receives what the others there lack, too.
        for basename in concerned | (rounds.missing(leader) if leader == group.rank else set()):
            files.expect(entries[basename])
        notes += carry(group, rounds, shards)
        without |= rounds.barred
        failed = failed - concerned | rounds.missing(leader)
        done |= concerned - failed
        # What this rank was to send may have turned out to be damaged, and be what it needs itself.
        more = spans.keys() - files.held.keys() - lacks.keys() - done
        gathered: list[tuple[str, bool, bool]] = group.all_gather((group.node, files.is_aside, bool(more)))
        again = any(lacks_more for _, _, lacks_more in gathered)
        if any(is_aside for node, is_aside, _ in gathered if node == group.node):
            # Memory had no room for it: it is where this rank would not look.
            files.step_aside()
    for basename in failed:
        # What the durable tier has is read from there; of the rest, reading says so.
        files.forget(basename)
    return notes


def share_reads(group: Group, files: ShardFiles, spans: Mapping[str, list[Span]]) -> None:
    """Tells the ranks of each node which chunks of the durable tier several of them read.

    Every rank calls this, in :meth:`Group.failing_together`.

    Raises:
        TieredCheckpointError: Some rank failed.
    """
    mine = {name: merged(wanted) for name, wanted in spans.items()}
    gathered: list[tuple[str, dict[str, list[Span]]]] = group.all_gather((group.node, mine))
    others: defaultdict[str, list[Span]] = defaultdict(list)
    for rank, (node, theirs) in enumerate(gathered):
        if node == group.node and rank != group.rank:
            # Of what this rank does not read itself, it need not know the chunks.
            for basename in theirs.keys() & mine.keys():
                others[basename] += theirs[basename]
    files.share({basename: set(indices) for basename, indices in files.chunks_of(others).items()})


class _Shards:
    """The pieces of shards that lie in this node's memory, or arrive there."""

    def __init__(self, files: ShardFiles, entries: Mapping[str, FileEntry], longest: int) -> None:
        self._files = files
        self._entries = entries
        #: Each piece that arrives lies here until it is verified.
        self._room = memoryview(bytearray(longest))

    def read(self, piece: Piece) -> memoryview:
        return self._files.peek(piece.basename, piece.offset, piece.length)

    def room(self, piece: Piece) -> memoryview:
        return self._room[: piece.length]

    def take(self, piece: Piece) -> None:
        entry, end = self._entries[piece.basename], 0
        for index in chunks_of(entry, [(piece.offset, piece.length)]):
            begin, end = end, min(end + entry.chunk_size, piece.length)
            self._files.put(piece.basename, index, self._room[begin:end])

    def suspect(self, piece: Piece) -> None:
        """Nothing to do: what is sent is verified before."""
