"""A planned file is put together in a buffer: the same bytes and hashes with any threads; layout of a rank's file.

Also if the buffer is filled from many short stretches of bytes.
"""

import ctypes
import io
import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.image import Copies, Untouched
from tiered_checkpoint_io.formats.shard_image import ALIGNMENT, TensorRow, plan_shard, skeleton_of
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model.documents import chunk_ranges, hash_bytes

MIB = 1 << 20


def filled(image, **options):
    buffer = bytearray(image.size)
    with memoryview(buffer) as view:
        image.fill(view, **options)
    return bytes(buffer)


def test_a_tensor_that_shrank_meanwhile_is_an_error_and_no_crash():
    weight = torch.ones(1 << 20)
    image = plan({"w": weight})
    weight.untyped_storage().resize_(8)
    with pytest.raises(ConfigError, match="resized"):
        filled(image)


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


PIECE = 20 << 10

#: Number of stretches, the longest, the largest gap in bytes between two, and how they are drawn.
LAYOUTS = st.tuples(
    st.integers(0, 300),
    st.sampled_from([1, 2, 5, 64, 300, 2049, 9000, 20_000, 40_000]),
    st.sampled_from([0, 1, 70, 900]),
    st.integers(0, 99),
)


def check(count: int, longest: int, gap: int, seed: int) -> None:
    """Copies so many stretches, and compares."""
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


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_all_bytes_come_to_their_places(layout):
    check(*layout)


def tensors():
    base = torch.arange(5000, dtype=torch.float32)
    square = torch.randn(40, 30)
    return {
        "whole": torch.randn(3, 5),
        "view": base[7:107],
        "matrix of a view": base[:400].view(20, 20)[3:9],
        "transposed": square.t(),
        "scattered": square[::3, 1::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty of shape": torch.empty(3, 0, 2),
        "bf16": torch.randn(33).bfloat16(),
        "fp8": torch.randn(17).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(9),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(6, 2)),
        "odd strides": torch.randn(4)[None].as_strided((1, 4), (77, 1)),
        "large": torch.randn(5 << 20),
    }


def file_of(items):
    image, placed = plan_shard(items)
    buffer = mmap.mmap(-1, max(1, image.size))
    buffer[:] = b"\xaa" * len(buffer)
    hashes = image.fill(memoryview(buffer))
    data = bytes(buffer[: image.size])
    ranges = chunk_ranges(image.size, image.chunk_size)
    assert hashes == tuple(hash_bytes(data[offset : offset + length]) for offset, length in ranges)
    # No earlier byte of the buffer is left between the items.
    end = 0
    for each in placed:
        assert each.offset % ALIGNMENT == 0
        assert not any(data[end : each.offset])
        end = each.offset + each.length
    assert not any(data[end:])
    return data, placed


def raw(tensor):
    """Returns a tensor's elements, row by row, as bytes."""
    plain = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def test_where_torch_lays_out_its_file_otherwise_the_elements_are_there_all_the_same(monkeypatch):
    """A release of torch that is not known yet: its files are made by torch.save, at the cost of time and memory."""
    save = torch.serialization._save

    def with_one_more(value, file, *options):
        save(value, file, *options)
        file.write_record("more", b"1", 1)

    monkeypatch.setattr(torch.serialization, "_save", with_one_more)
    items = [torch.arange(103.0), torch.arange(34.0).view(2, 17).t(), torch.empty(0, 19)]
    data, placed = file_of(items)
    for item, each in zip(items, placed, strict=True):
        assert same(torch.load(io.BytesIO(data[each.offset : each.offset + each.length])), item)
    with pytest.raises(ValueError, match="not copied"):
        TensorRow(items)
    assert skeleton_of(torch.float32, (107,)).length == 0, "no item is taken for one of this layout"


@pytest.mark.parametrize("name", sorted(tensors()))
def test_an_item_alone_is_what_torch_save_writes(name):
    tensor = tensors()[name]
    data, (placed,) = file_of([tensor])
    clone = tensor.detach().clone()
    image, buffer = plan(clone), io.BytesIO()
    torch.save(clone, buffer)
    alone = bytearray(image.size)
    image.fill(memoryview(alone))
    assert name in ("conjugate", "odd strides") or data[: placed.length] == alone
    mine = torch.load(io.BytesIO(data[placed.offset : placed.offset + placed.length]))
    theirs = torch.load(io.BytesIO(buffer.getvalue()))
    assert type(mine) is type(theirs)
    assert not mine.requires_grad
    if name != "odd strides":
        assert mine.stride() == theirs.stride()
    assert same(mine, theirs)
    assert mine.untyped_storage().nbytes() == tensor.nbytes
