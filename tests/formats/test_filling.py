"""A planned file is put together in a buffer: the same bytes and hashes with any threads; no byte outside.

Also if the buffer is filled from many short stretches of bytes.
"""

import ctypes
import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats import image as copies_module
from tiered_checkpoint_io.formats.image import Copies, Untouched, gathering
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model.hashing import chunk_ranges, hash_bytes

MIB = 1 << 20


def filled(image, **options):
    buffer = bytearray(image.size)
    with memoryview(buffer) as view:
        image.fill(view, **options)
    return bytes(buffer)


def test_many_small_tensors_in_several_chunks():
    sizes = [1, 7, 4096, 5000, 300]
    image = plan({f"p{n}": torch.full((sizes[n % 5],), float(n)) for n in range(6000)})
    assert image.size > 2 * image.chunk_size
    wanted = bytearray(image.size)
    for region in image.regions:
        wanted[region.offset : region.offset + region.nbytes] = ctypes.string_at(
            region.storage.data_ptr(), region.nbytes
        )
    for segment in image.segments:
        wanted[segment.offset : segment.offset + segment.nbytes] = segment.data
    for count in (1, 2, 8):
        for hashed in (True, False):
            assert filled(image, threads=count, hashed=hashed) == wanted


def test_a_tensor_that_shrank_meanwhile_is_an_error_and_no_crash():
    weight = torch.ones(1 << 20)
    image = plan({"w": weight})
    weight.untyped_storage().resize_(8)
    with pytest.raises(ConfigError, match="resized"):
        filled(image)


def test_a_buffer_that_is_too_small_is_refused_and_a_larger_one_left_alone_behind_the_file():
    image = plan({"w": torch.ones(9)})
    with pytest.raises(ValueError, match="bytes"):
        image.fill(memoryview(bytearray(image.size - 1)))
    buffer = bytearray(b"x" * (image.size + 5))
    image.fill(memoryview(buffer))
    assert buffer[image.size :] == b"xxxxx"
    buffer += b"the buffer is not held any more"


# ---------------------------------------------------------------------------------------- untouched pages
@pytest.fixture(scope="module")
def file(tmp_path_factory):
    descriptor = os.open(tmp_path_factory.mktemp("slot") / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def written(image, file, start, **options):
    """Returns the bytes of a file after a filling, and the hashes; earlier bytes are 0xFF."""
    os.ftruncate(file, 0)
    os.ftruncate(file, image.size + 100)
    with mmap.mmap(file, image.size + 100) as mapping:
        mapping[:] = b"\xff" * len(mapping)
        untouched = None if start is None else Untouched(file, start)
        with memoryview(mapping) as view:
            hashes = image.fill(view, untouched=untouched, **options)
        return mapping[:], hashes


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 7, 1000, (512 << 10) // 4, 3 * MIB // 4, 17 * MIB // 4]), max_size=6),
    st.integers(0, 60 * MIB),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_is_written_is_what_would_have_been_copied(file, sizes, start, threads, hashed):
    image = plan({str(number): torch.arange(size) * 3.5 for number, size in enumerate(sizes)})
    mapped = written(image, file, None)
    content, hashes = written(image, file, min(start, image.size), threads=threads, hashed=hashed)
    assert content == mapped[0], "and what lies behind the file is left alone"
    assert hashes == (mapped[1] if hashed else ())
    chunks = chunk_ranges(image.size, image.chunk_size)
    assert mapped[1] == tuple(hash_bytes(content[offset : offset + length]) for offset, length in chunks)
    assert mapped[1] == image.hashes(memoryview(content))


def test_short_writes_are_continued(file, monkeypatch):
    image = plan({"w": torch.randn(MIB // 4)})
    expected = written(image, file, None)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda to, data, offset: pwrite(to, data[:70_001], offset))
    assert written(image, file, 0) == expected


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
    # Their order differs from the order of their places.
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
        # The target is complete now, and no other byte was touched.
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
    """The system stops at such a row: then each row is copied by a call of its own."""
    gather, target = gathering(), np.zeros(2, np.int64)
    rows = np.array([[target.ctypes.data, 16]])
    assert not gather(rows, np.array([[target.ctypes.data, 8], [8, 8]]))
