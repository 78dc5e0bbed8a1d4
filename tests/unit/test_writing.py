"""What a mapping has not touched is written by its file: the same bytes, and the same hashes."""

import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.formats.writing import Untouched

MIB = 1 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    descriptor = os.open(tmp_path_factory.mktemp("slot") / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def filled(image, file, start, **options):
    """The bytes of a file after a filling, and the hashes; what was there before is 0xFF."""
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
    mapped = filled(image, file, None)
    content, hashes = filled(image, file, min(start, image.size), threads=threads, hashed=hashed)
    assert content == mapped[0], "and what lies behind the file is left alone"
    assert hashes == (mapped[1] if hashed else ())


def test_short_writes_are_continued(file, monkeypatch):
    image = plan({"w": torch.randn(MIB // 4)})
    expected = filled(image, file, None)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda to, data, offset: pwrite(to, data[:70_001], offset))
    assert filled(image, file, 0) == expected
