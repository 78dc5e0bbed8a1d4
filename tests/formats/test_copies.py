"""Many stretches of bytes are copied to their places, whatever their lengths, and nothing beside them is touched."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.formats import image as copies_module
from tiered_checkpoint_io.formats.image import Copies, gathering

CHUNK, PIECE = 16 << 10, 4 << 10

#: Number of stretches, the longest, the largest gap in bytes between two, and how they are drawn.
LAYOUTS = st.tuples(
    st.integers(0, 300),
    st.sampled_from([1, 2, 5, 64, 300, 2047, 2048, 2049, 9000, 20_000]),
    st.sampled_from([0, 1, 70, 900]),
    st.integers(0, 99),
)


def check(count: int, longest: int, gap: int, seed: int) -> int:
    """Copies so many stretches, and compares; how many calls that took."""
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
    copies = Copies(target, offsets[shuffled], lengths[shuffled], (source.ctypes.data + places)[shuffled], piece=PIECE)
    got = np.frombuffer(target, np.uint8)
    elsewhere = (ctypes.c_char * PIECE)()
    for piece in range(-(-size // PIECE)):
        begin, end = piece * PIECE, min((piece + 1) * PIECE, size)
        ctypes.memset(elsewhere, 0, PIECE)
        copies.copy(piece, ctypes.addressof(elsewhere) - ctypes.addressof(target) - begin)
        assert np.array_equal(np.frombuffer(elsewhere, np.uint8)[: end - begin], wanted[begin:end])
        assert not got[begin:].any()
        copies.copy(piece)
        # It is complete now, and nothing but it was touched.
        assert np.array_equal(got[:end], wanted[:end])
        assert not got[end:].any()
    return copies.calls


NEEDS_THE_CALL = pytest.mark.skipif(gathering() is None, reason="this system does not allow the call")
WAYS = {"at once": gathering, "one by one": lambda: None, "refused later": lambda: lambda _targets, _sources: False}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=100, deadline=None)
@given(LAYOUTS)
def test_all_bytes_come_to_their_places(way, layout):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies_module, "gathering", WAYS[way])
        check(*layout)


@NEEDS_THE_CALL
def test_short_stretches_share_a_call():
    pieces = 2000 * 85 // PIECE + 2
    # More than the system takes at once are in two.
    assert pieces / 2 < check(2000, 150, 10, 1) <= pieces
    assert check(9000, 2, 0, 1) < 9000 * 2 // PIECE * 2 + 3
    assert check(20, 150, 0, 1) >= 20 - 2


@NEEDS_THE_CALL
def test_what_can_not_be_read_is_told_and_does_no_harm():
    """As where the system stops: a call for each is made then."""
    gather, target = gathering(), np.zeros(2, np.int64)
    rows = np.array([[target.ctypes.data, 16]])
    assert not gather(rows, np.array([[target.ctypes.data, 8], [8, 8]]))
