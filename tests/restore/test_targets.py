"""Bytes are read straight to their targets: equal to a plain slice, and never from a chunk of unnoticed damage."""

import itertools
import os
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.restoring import OneObject, make_content

from tiered_checkpoint_io.engine.chunks import Copies, Copy
from tiered_checkpoint_io.engine.restore import targets
from tiered_checkpoint_io.engine.restore.shared_reads import FetchedFile, SharedFolder
from tiered_checkpoint_io.errors import CorruptCheckpointError

CHUNK = 3 * targets.PIECE_SIZE + 77
DATA = os.urandom(3 * CHUNK + 1234)
(ENTRY,) = make_content("step_1/file", DATA, 1, chunk=CHUNK).files


def from_memory(data, wanted):
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        for index, parts in targets.by_chunk(ENTRY, wanted).items():
            targets.read_chunk(ENTRY, index, file.fileno(), parts, where="here")


def from_store(data, wanted):
    for index, parts in targets.by_chunk(ENTRY, wanted).items():
        targets.fetch_targets(OneObject(data), ENTRY, index, parts)


@st.composite
def spans(draw):
    """Returns disjoint spans of the file, in any order; some touch each other."""
    cuts = sorted(draw(st.sets(st.integers(0, len(DATA)), min_size=2, max_size=12)))
    found = [(low, high) for low, high in itertools.pairwise(cuts) if draw(st.booleans())]
    return draw(st.permutations(found))


@pytest.mark.parametrize("fill", [from_memory, from_store])
@settings(max_examples=20, deadline=None)
@given(wanted=spans(), flipped=st.integers(0, len(DATA) - 1))
def test_each_target_holds_its_bytes_and_each_chunk_that_it_lies_in_is_verified(fill, wanted, flipped):
    buffers = [bytearray(high - low + 2) for low, high in wanted]
    given_targets = [(low, memoryview(buffer)[1:-1]) for (low, _), buffer in zip(wanted, buffers, strict=True)]
    fill(DATA, given_targets)
    for (low, high), buffer in zip(wanted, buffers, strict=True):
        assert buffer == b"\0" + DATA[low:high] + b"\0"
    damaged = bytearray(DATA)
    damaged[flipped] ^= 1
    touched = {at // CHUNK for low, high in wanted for at in (*range(low, high, CHUNK), high - 1)}
    if flipped // CHUNK in touched:
        with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
            fill(bytes(damaged), given_targets)
    else:
        fill(bytes(damaged), given_targets)


@pytest.mark.parametrize("alone", [True, False])
def test_a_node_reads_each_byte_once_and_a_lone_rank_keeps_no_copy(tmp_path, alone):
    folder, store = SharedFolder(tmp_path, "save"), OneObject(DATA)
    files = [
        FetchedFile(Copies(ENTRY, [Copy(lambda: store, ENTRY.path)]), folder.path, concurrency=3, timeout_s=10.0)
        for _ in range(1 if alone else 2)
    ]
    # A chunk that something else is read from is there already.
    files[0].ensure([(CHUNK, 1)])
    for file in files:
        whole = memoryview(bytearray(len(DATA)))
        file.fill([(0, whole)], alone=lambda _: alone)
        assert whole == DATA
    assert store.down == len(DATA)
    kept = os.stat(folder.path / "file").st_blocks * 512
    assert (kept < 2 * CHUNK) == alone
    for file in files:
        file.close()
    folder.close()


def test_a_target_beyond_the_file_is_damage():
    with pytest.raises(CorruptCheckpointError, match="names bytes up to"):
        targets.by_chunk(ENTRY, [(len(DATA) - 3, memoryview(bytearray(4)))])
