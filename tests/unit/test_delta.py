"""How a delta upload is planned: by hashes alone, within the limits of S3, and equal to the file whatever the plan."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.model.delta import Same, pieces_of, same_ranges
from tiered_checkpoint_io.model.hashing import chunk_ranges, hash_bytes
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.model.s3_limits import MAX_PARTS, MIN_PART

CHUNK = 4
MIB = 1 << 20


def entry(path, data):
    hashes = tuple(hash_bytes(data[start : start + length]) for start, length in chunk_ranges(len(data), CHUNK))
    return FileEntry(path, len(data), CHUNK, hashes)


files = st.lists(st.sampled_from([b"aaaa", b"bbbb", b"cccc", b"dddd"]), max_size=12).map(b"".join)


@given(files, st.dictionaries(st.sampled_from(["p", "q"]), files), st.binary(max_size=3))
def test_ranges_said_to_be_the_same_are_and_no_chunk_that_is_there_is_left_out(new, earlier, tail):
    new += tail
    same = same_ranges(entry("new", new), [entry(path, data) for path, data in earlier.items()])
    covered = set()
    for each in same:
        length = each.stop - each.start
        assert new[each.start : each.stop] == earlier[each.key][each.offset : each.offset + length] != b""
        covered |= set(range(each.start, each.stop))
    for start, length in chunk_ranges(len(new), CHUNK):
        chunk = new[start : start + length]
        chunks_there = {
            data[at : at + size] for data in earlier.values() for at, size in chunk_ranges(len(data), CHUNK) if size
        }
        assert (chunk in chunks_there) == (start in covered)
    assert list(same) == sorted(same)


def test_equal_bytes_at_the_same_place_are_one_range():
    old = b"zzzz" * 8
    assert same_ranges(entry("new", old), [entry("old", old)]) == (Same(0, 32, "old", 0),)


@st.composite
def uploads(draw):
    """Sizes up to some terabytes, and ranges that lie anywhere in the file, also side by side."""
    size = draw(st.integers(1, 1 << draw(st.integers(1, 42))))
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=30)) | {0, size})
    same = [
        Same(start, stop, draw(st.sampled_from(["a", "b"])), draw(st.integers(0, 1 << 40)))
        for start, stop in itertools.pairwise(cuts)
        if draw(st.booleans())
    ]
    part_size = max(draw(st.integers(8, 64)) * MIB, -(-size // MAX_PARTS))
    return size, same, part_size, max(part_size, 256 * MIB)


@given(uploads())
@settings(max_examples=100)
def test_the_parts_of_an_upload_are_legal_and_are_the_file(upload):
    size, same, part_size, copy_size = upload
    pieces = pieces_of(size, same, part_size, copy_size)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == size
    assert len(pieces) <= MAX_PARTS
    lengths = [piece.stop - piece.start for piece in pieces]
    assert min(lengths[:-1], default=MIN_PART) >= MIN_PART
    assert 0 < lengths[-1] <= max(lengths) <= 5 << 30
    # What is copied is what the ranges say: each byte of it is at the same distance from the beginning of both.
    for piece in pieces:
        if piece.key:
            assert any(
                each.key == piece.key
                and each.start <= piece.start
                and piece.stop <= each.stop
                and each.offset - each.start == piece.offset - piece.start
                for each in same
            )
    # At most the shortest possible part is sent beyond what has to be, before or in each range.
    copied = sum(piece.stop - piece.start for piece in pieces if piece.key)
    assert copied >= sum(each.stop - each.start for each in same) - 2 * MIN_PART * len(same)


def test_very_many_changes_are_sent_in_few_parts():
    """A change in every 12 MiB of 400 GiB: 35,000 ranges are more than an upload may have parts."""
    step = 12 * MIB
    size = 400 << 30
    same = [Same(at, min(at + 6 * MIB, size), "old", at) for at in range(0, size, step)]
    same[100] = Same(same[100].start, same[150].start, "old", same[100].start)
    del same[101:150]
    pieces = pieces_of(size, same, 64 * MIB, 256 * MIB)
    assert len(pieces) <= MAX_PARTS
    assert sum(piece.stop - piece.start for piece in pieces if piece.key) == 600 * MIB
