"""What travels between nodes when ranks load a sharded checkpoint: a pure decision."""

import os
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from support.restoring import in_ranks

from tiered_checkpoint_io.engine.chunks import chunks_of, merged
from tiered_checkpoint_io.engine.restore.shard_exchange import ShardNeed, exchange, plan, share_reads
from tiered_checkpoint_io.model.hashing import MIN_CHUNK_SIZE
from tiered_checkpoint_io.model.manifest import FileEntry

#: An eighth of the smallest chunk.
UNIT = MIN_CHUNK_SIZE // 8


def entry(name, chunks):
    return FileEntry(f"step_1/{name}", 10 * chunks, 10, ("",) * chunks)


def moves(needs, without=()):
    """What travels, as (basename, chunk, source, target), and in how many rounds."""
    entries, rounds = plan(needs, without)
    turns = list(iter(rounds.next, []))
    found = [
        (move.piece.basename, move.piece.offset // 10, move.source, move.target) for turn in turns for move in turn
    ]
    assert {each[0] for each in found} == entries.keys()
    return sorted(found), len(turns)


def test_each_chunk_travels_once_to_each_node_that_needs_it():
    needs = [
        ShardNeed("a", {}, {"x": entry("x", 3)}),
        ShardNeed("b", {"x": [(5, 10)]}, {"y": entry("y", 1)}),
        ShardNeed("b", {"x": [(0, 1), (12, 3)]}),
        ShardNeed("c", {"x": [(29, 1)], "y": [(0, 4)]}),
    ]
    assert moves(needs) == ([("x", 0, 0, 1), ("x", 1, 0, 1), ("x", 2, 0, 3), ("y", 0, 1, 3)], 3)


def test_nodes_send_side_by_side_what_all_others_need():
    """As DCP saves what is replicated: each byte once, spread over the nodes."""
    files = {f"f{node}": entry(f"f{node}", 3) for node in range(16)}
    needs = [
        ShardNeed(
            f"n{node}", {name: [(0, 30)] for name in files if name != f"f{node}"}, {f"f{node}": files[f"f{node}"]}
        )
        for node in range(16)
    ]
    found, turns = moves(needs)
    assert len(found) == 16 * 15 * 3
    assert turns <= 15 * 3 + 1


def test_a_source_that_failed_is_left_out_for_that_file_alone():
    x, y = entry("x", 10), entry("y", 10)
    needs = [
        ShardNeed("a", holds={"x": x, "y": y}),
        ShardNeed("b", holds={"x": x}),
        ShardNeed("c", {"x": [(0, 1)], "y": [(0, 1)]}),
    ]
    assert {each[:3:2] for each in moves(needs)[0]} <= {("x", 0), ("x", 1), ("y", 0)}
    assert [each[:3:2] for each in moves(needs, {("x", 0)})[0]] == [("x", 1), ("y", 0)]
    assert [each[:3:2] for each in moves(needs, {("x", 0), ("x", 1)})[0]] == [("y", 0)]


def test_no_rank_sends_to_its_own_node_what_another_one_there_has_found_damaged():
    x = entry("x", 3)
    needs = [ShardNeed("a", holds={"x": x}), ShardNeed("a", {"x": [(5, 10)]}), ShardNeed("b", {"x": [(0, 1)]})]
    assert moves(needs) == ([], 0)
    found, _ = moves([*needs, ShardNeed("c", holds={"x": x})])
    assert sorted((each[1], each[3]) for each in found) == [(0, 0), (0, 2), (1, 0)]
    assert 3 in {each[2] for each in found}


def test_a_file_that_nobody_holds_is_left_to_whoever_needs_it():
    assert moves([ShardNeed("a", {"x": [(0, 1)]}), ShardNeed("b")]) == ([], 0)


class Files:
    """A checkpoint as a rank sees it: what its node holds, and what has come there."""

    is_aside = False

    def __init__(self, held, content):
        self.held, self.content, self.came, self.expected = held, content, {}, set()

    def verified(self, basename, spans):
        pass

    def expect(self, entry):
        self.expected.add(entry)

    def peek(self, basename, offset, length):
        if basename in self.held:
            return memoryview(self.content)[offset:][:length]
        return memoryview(b"".join(self.came[basename][at] for at in range(offset // 10, (offset + length) // 10)))

    def put(self, basename, index, data):
        self.came.setdefault(basename, {})[index] = bytes(data)

    def chunks_of(self, spans):
        return {name: chunks_of(self.held[name], each) for name, each in spans.items()}

    def share(self, others):
        self.others = others


def test_the_lowest_rank_of_a_node_alone_says_what_it_holds_and_receives_for_all_there():
    # Each exchange stays small, see ``in_ranks``, however many hashes a file has, and tensors that ranks lack.
    content, needs, spans = os.urandom(4000), [], {"x": [(10 * at, 4) for at in range(400)]}
    whole = FileEntry("step_1/x", 4000, 10, tuple(f"{at:032}" for at in range(400)))

    def work(group):
        gather, files = group.all_gather, Files({"x": whole} if group.node == "a" else {}, content)

        def noted(obj):
            if isinstance(obj, ShardNeed):
                needs.append((group.rank, obj))
            return gather(obj)

        group.all_gather = noted
        notes = exchange(group, files, spans)
        return (
            notes,
            {name: b"".join(each[at] for at in sorted(each)) for name, each in files.came.items()},
            files.expected,
        )

    told = in_ranks("aabbc", work)
    arrived = ([], {"x": content}, {whole})
    assert told == [([], {}, set())] * 2 + [arrived, ([], {}, {whole}), arrived]
    assert [rank for rank, need in needs if need.holds] == [0]


def test_ranks_of_a_node_learn_which_chunks_the_others_there_read_however_many():
    large = FileEntry("step_1/x", 5000 * MIN_CHUNK_SIZE, MIN_CHUNK_SIZE, ())
    mine = [(MIN_CHUNK_SIZE * at, 9) for at in range(3000)], [(MIN_CHUNK_SIZE * 4000 - 1, 2)], [(0, 1)]

    def work(group):
        files = Files({"x": large}, b"")
        share_reads(group, files, {"x": mine[group.rank]})
        return files.others

    assert in_ranks("aab", work) == [{"x": {3999, 4000}}, {"x": set(range(3000))}, {}]


def test_a_rank_asks_for_the_chunks_of_no_file_that_others_of_its_node_read_alone():
    """That would be a request to the durable tier for each."""

    def work(group):
        own = "xy"[group.rank]
        files = Files({own: entry(own, 2), "z": entry("z", 2)}, b"")
        share_reads(group, files, {own: [(0, 20)], "z": [(10 * group.rank, 10)]})
        return files.others

    assert in_ranks("aa", work) == [{"z": {1}}, {"z": {0}}]


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40)), max_size=12), st.sampled_from([1, 2, 8]))
def test_merged_spans_touch_the_same_chunks_and_are_at_most_one_a_chunk(spans, factor):
    spans = [(offset * UNIT, length * UNIT) for offset, length in spans]
    large = FileEntry("x", 440 * UNIT, MIN_CHUNK_SIZE * factor, ())
    fewer = merged(spans)
    assert chunks_of(large, fewer) == chunks_of(large, spans)
    assert all(offset - sum(before) >= MIN_CHUNK_SIZE for before, (offset, _) in pairwise(fewer))
    assert max(map(sum, fewer), default=0) == max((sum(each) for each in spans if each[1]), default=0)
