"""Many stretches of bytes are copied to their places, whatever their lengths, and nothing beside them is touched."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.formats import copies as copies_module
from tiered_checkpoint_io.formats.copies import Copies

CHUNK, PIECE = 16 << 10, 4 << 10

#: How many stretches, the longest, how many bytes there are between two at most, and how they are drawn.
LAYOUTS = st.tuples(
    st.integers(0, 300),
    st.sampled_from([1, 2, 5, 64, 300, 2047, 2048, 2049, 9000, 20_000]),
    st.sampled_from([0, 1, 70, 900]),
    st.integers(0, 99),
)


def check(count: int, longest: int, gap: int, seed: int) -> int:
    """Copies so many stretches, and compares; how many calls those took that are not short."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest + 1, count)
    gaps = random.integers(0, gap + 1, count)
    offsets = np.cumsum(lengths + gaps) - lengths
    size = int((lengths + gaps).sum()) + gap + 1
    # They lie in another order than they belong.
    order = random.permutation(count)
    places = np.empty(count, np.int64)
    places[order] = np.cumsum(lengths[order] + 1) - lengths[order]
    source = random.integers(1, 256, int((lengths + 1).sum()) + 1, dtype=np.uint8)
    wanted = np.zeros(size, np.uint8)
    for offset, length, place in zip(offsets, lengths, places, strict=True):
        wanted[offset : offset + length] = source[place : place + length]
    target = (ctypes.c_char * size)()
    shuffled = random.permutation(count)
    copies = Copies(
        target,
        offsets[shuffled],
        lengths[shuffled],
        (source.ctypes.data + places)[shuffled],
        cuts=(CHUNK, PIECE),
    )
    got = np.frombuffer(target, np.uint8)
    for chunk in range(-(-size // CHUNK)):
        copies.copy_short(chunk)
        for piece in range(chunk * CHUNK // PIECE, min((chunk + 1) * CHUNK, size + PIECE - 1) // PIECE):
            copies.copy_long(piece)
            assert not got[(piece + 1) * PIECE :].any() or copies.has_short(chunk)
        # It is complete now, and nothing but it was touched.
        end = min((chunk + 1) * CHUNK, size)
        assert np.array_equal(got[chunk * CHUNK : end], wanted[chunk * CHUNK : end])
        assert not got[end : end + CHUNK].any()
    assert np.array_equal(got, wanted)
    return copies.calls


@settings(max_examples=100, deadline=None)
@given(LAYOUTS)
def test_all_bytes_come_to_their_places(layout):
    check(*layout)


@pytest.mark.parametrize("at_once", [1, 300, 4096])
def test_short_stretches_that_take_several_copies(monkeypatch, at_once):
    monkeypatch.setattr(copies_module, "_AT_ONCE", max(at_once, 2048))
    monkeypatch.setattr(copies_module, "_FEW", 1)
    for longest in (1, 130, 2047):
        check(700, longest, 90, at_once)


def test_calls_are_made_for_long_stretches_alone():
    # One stretch may reach over the end of a chunk.
    assert check(2000, 150, 10, 1) <= 2 * (2000 * 85 // CHUNK + 2)
    assert check(40, 150, 0, 1) >= 40 - 2
