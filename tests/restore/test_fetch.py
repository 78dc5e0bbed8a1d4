"""Chunks are fetched whole and verified as they arrive, within bounds; on a node each once, for any first reader."""

import itertools
import mmap
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faulty import FaultyStore
from support.restoring import CHUNK, OneObject, flip, make_content

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.chunks import (
    Copies,
    Copy,
    chunks_of,
    merged,
    unverified,
    writer_to,
)
from tiered_checkpoint_io.engine.restore.shards import share_reads
from tiered_checkpoint_io.engine.restore.shared_reads import FetchedFile, SharedFolder, clear_reads
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError
from tiered_checkpoint_io.model.documents import MIN_CHUNK_SIZE
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.directory import DirectoryStore

DATA = os.urandom(20 * CHUNK + 7)
(ENTRY,) = make_content("d/a.ckpt", DATA, 1).files


@pytest.fixture
def store(tmp_path):
    store = DirectoryStore(str(tmp_path))
    store.put("d/a.ckpt", DATA)
    return store


def fetch(store, view, entry=ENTRY, **options):
    Copies(entry, [Copy(lambda: store, entry.path)]).fetch(memoryview(view), **options)


class Watched(FaultyStore):
    """Notes how many reads run at once, and lets that many meet."""

    def __init__(self, store, meeting, **options):
        super().__init__(store, **options)
        self.meeting = threading.Barrier(meeting)
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()

    def read_into(self, key, offset, buffer):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        if not self.meeting.broken:
            try:
                self.meeting.wait(5)
                self.meeting.abort()
            except threading.BrokenBarrierError:
                pass
        super().read_into(key, offset, buffer)
        with self.lock:
            self.running -= 1


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_fills_every_byte_reads_each_once_and_stays_within_the_bound(store, concurrency):
    watched = Watched(store, min(concurrency, len(ENTRY.hashes)))
    buffer = bytearray(len(DATA))
    fetch(watched, buffer, concurrency=concurrency)
    assert buffer == DATA
    assert store.metrics.snapshot()["bytes.down"] == len(DATA)
    assert watched.most == min(concurrency, len(ENTRY.hashes))
    again = bytearray(len(DATA))
    fetch(store, again, unverified("d/a.ckpt", len(again)), concurrency=concurrency)
    assert again == DATA


@pytest.mark.parametrize("piece", [100, CHUNK, 512 << 10])
def test_fresh_pages_are_written_with_the_same_bytes_and_verified(store, tmp_path, monkeypatch, piece):
    """However few of them the kernel takes at once."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:7_001], offset))
    monkeypatch.setattr(chunks, "PIECE_SIZE", piece)
    with open(tmp_path / "fresh", "w+b") as file:
        file.truncate(len(DATA))
        # An error that is looked at keeps a piece of it.
        view = memoryview(mmap.mmap(file.fileno(), len(DATA)))
        fetch(store, view, concurrency=3, write=writer_to(file.fileno()))
        assert view == DATA
        flip(tmp_path / "d" / "a.ckpt", 5 * CHUNK)
        with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
            fetch(store, view, concurrency=3, write=writer_to(file.fileno()))


# --------------------------------------------------------------------- chunks that ranks of a node read
def opened(folder, store, *, timeout_s=10.0, alone=False):
    copies = Copies(ENTRY, [Copy(lambda: store, ENTRY.path)])
    return FetchedFile(copies, folder.path, concurrency=4, timeout_s=timeout_s, reads_alone=lambda _: alone)


@pytest.fixture
def folder(tmp_path):
    folder = SharedFolder(tmp_path, "save")
    yield folder
    folder.close()


def test_the_wait_for_another_reader_is_bounded(folder):
    slow, quick = OneObject(DATA, wait_s=1.0), OneObject(DATA)
    first, second = opened(folder, slow), opened(folder, quick, timeout_s=0.1)
    thread = threading.Thread(target=first.ensure, args=([(0, 10)],))
    thread.start()
    while not slow.asked:
        time.sleep(0.001)
    with pytest.raises(RestoreError, match="has not fetched 1 chunks in time"):
        second.ensure([(0, 10)])
    thread.join(30)
    second.ensure([(0, 10)])
    assert quick.asked == []
    first.close()
    second.close()


def test_the_last_reader_removes_the_folder(tmp_path):
    first, second = SharedFolder(tmp_path, "save"), SharedFolder(tmp_path, "save")
    first.close()
    assert second.path.exists()
    clear_reads(tmp_path)
    assert second.path.exists(), "a reader still has it open"
    second.close()
    assert not second.path.exists()


def left_behind(root):
    """Makes a folder as after a power loss: the marks of verified chunks are on the disk, and the chunks are not."""
    child = os.fork()
    if not child:
        file = opened(SharedFolder(root, "save"), OneObject(DATA))
        file.ensure([(0, len(DATA))])
        file.view[: len(DATA)] = bytes(len(DATA))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (path,) = (root / "reads").iterdir()
    return path


def joined_and_read(root):
    folder = SharedFolder(root, "save")
    file = opened(folder, OneObject(DATA))
    file.ensure([(0, len(DATA))])
    data = bytes(file.view[: len(DATA)])
    file.close()
    folder.close()
    return data


def test_what_dead_readers_left_is_not_read_whichever_rank_comes_first(tmp_path):
    left_behind(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        for read in [threads.submit(joined_and_read, tmp_path) for _ in range(8)]:
            assert read.result(30) == DATA


# --------------------------------------------------------------------------- which chunks several read
#: An eighth of the smallest chunk.
UNIT = MIN_CHUNK_SIZE // 8


def test_ranks_of_a_node_learn_what_the_others_there_read_of_the_files_that_they_read_too():
    """Each other file would cost a request to the durable tier."""
    spans = {"x": [(0, 20)], "z": [(0, 10)]}, {"y": [(0, 20)], "z": [(10, 10), (40, 1)]}, {"z": [(9, 9)]}
    assert share_reads(spans, "aab") == [{"z": [(10, 10), (40, 1)]}, {"z": [(0, 10)]}, {}]


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40)), max_size=12), st.sampled_from([1, 2, 8]))
def test_merged_spans_touch_the_same_chunks_and_are_at_most_one_a_chunk(spans, factor):
    spans = [(offset * UNIT, length * UNIT) for offset, length in spans]
    large = FileEntry("x", 440 * UNIT, MIN_CHUNK_SIZE * factor, ())
    fewer = merged(spans)
    assert chunks_of(large, fewer) == chunks_of(large, spans)
    assert all(offset - sum(before) >= MIN_CHUNK_SIZE for before, (offset, _) in pairwise(fewer))
    assert max(map(sum, fewer), default=0) == max((sum(each) for each in spans if each[1]), default=0)


LARGE_CHUNK = 3 * chunks.PIECE_SIZE + 77
LARGE = os.urandom(3 * LARGE_CHUNK + 1234)
(LARGE_ENTRY,) = make_content("step_1/file", LARGE, 1, chunk=LARGE_CHUNK).files


def from_memory(data, wanted):
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        from_store(data, wanted, chunks.OpenFile(file.fileno(), "here"))


def from_store(data, wanted, store=None):
    for index, parts in chunks.by_chunk(LARGE_ENTRY, wanted).items():
        chunks.fetch_targets(store or OneObject(data), LARGE_ENTRY, index, parts)


@st.composite
def spans(draw):
    """Returns disjoint spans of the file, in any order; some touch each other."""
    cuts = sorted(draw(st.sets(st.integers(0, len(LARGE)), min_size=2, max_size=12)))
    found = [(low, high) for low, high in itertools.pairwise(cuts) if draw(st.booleans())]
    return draw(st.permutations(found))


@pytest.mark.parametrize("fill", [from_memory, from_store])
@settings(max_examples=20, deadline=None)
@given(wanted=spans(), flipped=st.integers(0, len(LARGE) - 1))
def test_each_target_holds_its_bytes_and_each_chunk_that_it_lies_in_is_verified(fill, wanted, flipped):
    buffers = [bytearray(high - low + 2) for low, high in wanted]
    given_targets = [(low, memoryview(buffer)[1:-1]) for (low, _), buffer in zip(wanted, buffers, strict=True)]
    fill(LARGE, given_targets)
    for (low, high), buffer in zip(wanted, buffers, strict=True):
        assert buffer == b"\0" + LARGE[low:high] + b"\0"
    damaged = bytearray(LARGE)
    damaged[flipped] ^= 1
    touched = {at // LARGE_CHUNK for low, high in wanted for at in (*range(low, high, LARGE_CHUNK), high - 1)}
    if flipped // LARGE_CHUNK in touched:
        with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
            fill(bytes(damaged), given_targets)
    else:
        fill(bytes(damaged), given_targets)


@pytest.mark.parametrize("alone", [True, False])
def test_a_node_reads_each_byte_once_and_a_lone_rank_keeps_no_copy(folder, alone):
    store = OneObject(DATA)
    files = [opened(folder, store, alone=alone) for _ in range(1 if alone else 2)]
    # A chunk that something else is read from is there already.
    files[0].ensure([(CHUNK, 1)])
    for file in files:
        whole = memoryview(bytearray(len(DATA)))
        file.fill([(0, whole)])
        assert whole == DATA
    assert store.down == len(DATA)
    kept = os.stat(folder.path / ENTRY.basename).st_blocks * 512
    assert (kept < 2 * CHUNK) == alone
    for file in files:
        file.close()


def test_a_target_beyond_the_file_is_damage():
    with pytest.raises(CorruptCheckpointError, match="names bytes up to"):
        chunks.by_chunk(LARGE_ENTRY, [(len(LARGE) - 3, memoryview(bytearray(4)))])
