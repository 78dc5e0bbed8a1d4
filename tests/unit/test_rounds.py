"""Which rank sends which piece to which, round by round: a pure decision of all ranks; and what is carried by it."""

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.restoring import in_ranks

from tiered_checkpoint_io.engine.ranks import rounds as module
from tiered_checkpoint_io.engine.ranks.rounds import Piece, Rounds, carry, in_pieces
from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model.manifest import FileEntry

CHUNK = 16


def entry(name, chunks):
    return FileEntry(name, CHUNK * chunks, CHUNK, ("",) * chunks)


def lacking_of(holders, chunks, ranks):
    """All pieces of files of so many chunks, lacked by all ranks but those that hold them."""
    others = {name: frozenset(ranks) - frozenset(having) for name, having in holders.items()}
    return in_pieces(
        {name: entry(name, chunks) for name in holders},
        {name: dict.fromkeys(range(chunks), others[name]) for name in holders},
    )


def planned(rounds, holders, lacking):
    """All rounds, each of which is possible."""
    have = defaultdict(set)
    for piece in lacking:
        have[piece] |= set(holders[piece.basename])
    turns = []
    while turn := rounds.next():
        assert max(Counter(move.source for move in turn).values()) == 1, "a rank sends two pieces at once"
        assert max(Counter(move.target for move in turn).values()) == 1, "a rank receives two pieces at once"
        for move in turn:
            assert move.source in have[move.piece], "a rank sends what it has not received"
            assert move.target not in have[move.piece], "a rank receives what it has"
        for move in turn:
            have[move.piece].add(move.target)
        turns.append(turn)
    return turns, have


@given(st.integers(2, 40), st.data())
def test_all_ranks_get_what_they_lack_and_many_send_at_once(ranks, data):
    some = st.frozensets(st.integers(0, ranks - 1), min_size=1)
    holders = {f"f{i}": data.draw(some) for i in range(data.draw(st.integers(1, 6)))}
    wanted = {name: dict(enumerate(data.draw(st.lists(some, max_size=8)))) for name in holders}
    wanted = {name: {i: who - holders[name] for i, who in each.items()} for name, each in wanted.items()}
    lacking = in_pieces({name: entry(name, 8) for name in holders}, wanted)
    turns, have = planned(Rounds(holders, lacking), holders, lacking)
    for piece, who in lacking.items():
        assert have[piece] == set(holders[piece.basename]) | who
    received = Counter(rank for who in lacking.values() for rank in who)
    first = Counter(
        min(holders[piece.basename]) for piece, who in lacking.items() if who and len(holders[piece.basename]) == 1
    )
    busiest = max([0, *received.values(), *first.values()])
    assert len(turns) <= busiest + math.log2(ranks) + 2


@pytest.mark.parametrize(
    ("having", "chunks"),
    [
        ({"a": [0]}, 8),
        ({"a": [0, 5, 9]}, 40),
        ({"a": [0], "b": [1]}, 64),
        ({f"f{rank}": [rank] for rank in range(64)}, 4),
        ({f"f{rank}": [rank, (rank + 1) % 64] for rank in range(64)}, 2),
    ],
    ids=["one holder", "three holders", "two files of two", "each a file of its own", "and its neighbour's"],
)
def test_64_nodes_have_all_after_about_as_many_rounds_as_one_lacks_pieces(having, chunks):
    lacking = lacking_of(having, chunks, range(64))
    turns, have = planned(Rounds(having, lacking), having, lacking)
    assert all(len(who) == 64 for who in have.values())
    most = max(Counter(rank for who in lacking.values() for rank in who).values())
    assert len(turns) <= most + math.log2(64) + 1


@given(st.integers(1, 9), st.integers(0, 40))
def test_who_has_received_a_piece_sends_it_on(having, lacking):
    holders = {"a": range(having)}
    pieces = lacking_of(holders, 1, range(having + lacking))
    turns, _ = planned(Rounds(holders, pieces), holders, pieces)
    assert len(turns) == math.ceil(math.log2((having + lacking) / having))


def test_pieces_grow_where_many_are_to_be_planned_and_hold_only_what_the_same_ranks_lack():
    one = {"a": {0: frozenset({1}), 1: frozenset({1}), 2: frozenset({1, 2}), 4: frozenset({1, 2})}}
    assert list(in_pieces({"a": entry("a", 5)}, one)) == [Piece("a", CHUNK * at, CHUNK) for at in (0, 1, 2, 4)]
    many = dict.fromkeys(range(1000), frozenset({1})) | {1: frozenset({1, 2})}
    pieces = list(in_pieces({"a": entry("a", 1000)}, {"a": many}))
    assert pieces[:3] == [Piece("a", 0, CHUNK), Piece("a", CHUNK, CHUNK), Piece("a", 2 * CHUNK, 7 * CHUNK)]
    assert sum(piece.length for piece in pieces) == 1000 * CHUNK
    assert len(pieces) < 150


class Memory:
    """A rank's pieces, by their bytes."""

    def __init__(self, held=(), broken=(), spoils=()):
        self.held, self.broken, self.spoils = {}, set(broken), set(spoils)
        self.held = {piece: self.content(piece) for piece in held}
        self.suspected, self.full, self.spoils_all = [], False, False

    @staticmethod
    def content(piece):
        return bytes([piece.offset // CHUNK % 251]) * piece.length

    def read(self, piece):
        if piece in self.broken:
            raise OSError(5, "the disk is broken")
        return memoryview(b"\xff" * piece.length if piece in self.spoils else self.held[piece])

    def room(self, piece):
        self._room = bytearray(piece.length)
        return memoryview(self._room)

    def take(self, piece):
        if self.full:
            raise OSError(28, "No space left on device")
        if self.spoils_all or self._room != self.content(piece):
            raise CorruptCheckpointError("differs from its hash", operation="restore")
        self.held[piece] = bytes(self._room)

    def suspect(self, piece):
        self.suspected.append(piece)


def carried(holders, chunks, memories, ranks=7, spoils=()):
    """What each rank was told, by rank, and the number of exchanges."""
    lacking = lacking_of(holders, chunks, range(ranks))
    for rank in spoils:
        memories[rank].spoils_all = True
    for name, having in holders.items():
        for rank in having:
            memories[rank].held |= {piece: Memory.content(piece) for piece in lacking if piece.basename == name}
    exchanges = Counter()

    def work(group):
        plan, gather = Rounds(holders, lacking), group.all_gather

        def counted(obj):
            exchanges[group.rank] += 1
            return gather(obj)

        group.all_gather = counted
        return carry(group, plan, memories[group.rank]), plan.missing(group.rank)

    return in_ranks([f"n{rank}" for rank in range(ranks)], work), lacking, exchanges


def test_what_one_rank_can_not_send_another_one_sends():
    memories = [Memory() for _ in range(7)]
    memories[0].broken = {Piece("a", at * CHUNK, CHUNK) for at in range(5)}
    memories[1].spoils = memories[0].broken
    told, lacking, _ = carried({"a": [0, 1, 2]}, 5, memories)
    for rank, (_, missing) in enumerate(told):
        assert not missing
        assert set(memories[rank].held) == set(lacking)
    notes = " ".join(note for theirs, _ in told for note in theirs)
    assert "rank 0 could not send it: OSError: [Errno 5] the disk is broken" in notes
    assert "from rank 1: differs from its hash" in notes
    assert memories[1].suspected
    assert not memories[2].suspected


def test_only_the_rank_that_did_not_send_is_barred_and_not_those_that_were_to_send_it_on():
    holders = {"a": [0, 3]}
    rounds = Rounds(holders, lacking_of(holders, 1, range(5)))
    (first, _), (sent_on,) = rounds.next(), rounds.next()
    assert (first.source, sent_on.source) == (0, first.target)
    rounds.miss([first, sent_on])
    assert rounds.barred == {("a", 0)}
    again = rounds.next()
    assert {move.target for move in again} == {first.target, sent_on.target}
    assert {move.source for move in again} <= {2, 3}


@pytest.mark.parametrize("spoiling", [{6}, {5, 6}, {0, 6}], ids=["one", "two", "and a rank that sends"])
def test_a_rank_that_spoils_what_it_receives_goes_without_and_the_others_get_all(monkeypatch, spoiling):
    monkeypatch.setattr(module, "_MEETING_BYTES", 12 * CHUNK)
    memories = [Memory() for _ in range(7)]
    told, lacking, _ = carried({"a": [0], "b": [1]}, 40, memories, spoils=spoiling)
    for rank, (_, missing) in enumerate(told):
        assert missing == (
            {piece.basename for piece in lacking if rank in lacking[piece]} if rank in spoiling else set()
        )
        assert rank in spoiling or set(memories[rank].held) == set(lacking)


def test_a_rank_to_which_several_say_that_they_can_not_send_is_not_to_blame():
    rounds, moves, target = Rounds({"a": [0, 1, 2]}, lacking_of({"a": [0, 1, 2]}, 20, range(5))), [], None
    while target is None:
        moves += rounds.next()
        target = next((rank for rank in (3, 4) if {(0, rank), (1, rank)} <= {move[1:] for move in moves}), None)
    missed = [next(move for move in moves if move[1:] == (source, target)) for source in (0, 1)]
    rounds.miss(missed, missed)
    assert rounds.barred == {("a", 0), ("a", 1)}
    while rounds.next():
        pass
    assert not rounds.missing(target)


def test_of_what_no_rank_can_send_all_know_that_it_is_missing_and_the_rest_arrives():
    memories = [Memory() for _ in range(7)]
    memories[0].broken = {Piece("a", 0, CHUNK)}
    told, lacking, _ = carried({"a": [0], "b": [1]}, 4, memories)
    assert [missing for _, missing in told] == [set()] + [{"a"}] * 6
    for memory in memories:
        assert {piece for piece in lacking if piece.basename == "b"} <= set(memory.held)


def test_a_rank_that_can_not_keep_what_arrives_is_an_error_of_all():
    memories = [Memory() for _ in range(7)]
    memories[4].full = True
    told, _, _ = carried({"a": [0]}, 4, memories)[0], None, None
    assert all("No space left on device" in str(error) for error in told)
    assert not any(getattr(error, "reason", None) == "lost_rank" for error in told)


def test_all_ranks_meet_after_a_bounded_number_of_bytes(monkeypatch):
    monkeypatch.setattr(module, "_MEETING_BYTES", 4 * CHUNK)
    memories = [Memory() for _ in range(4)]
    told, _, exchanges = carried({"a": [0], "b": [0]}, 20, memories, ranks=3)
    assert all(not missing for _, missing in told)
    # 40 pieces for each of two ranks.
    assert {exchanges[rank] for rank in range(3)} == {11}
