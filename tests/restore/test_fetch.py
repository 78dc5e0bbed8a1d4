"""Fetching: whole, verified as it arrives, bounded, and stopped by the first failure."""

import mmap
import os
import threading

import pytest
from support.failing import failing
from support.faulty import FaultyStore
from support.restoring import CHUNK, flip, make_content

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.chunks import drop_temporary, fetch, temporary_file, unverified, verify, writer_to
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError, StoreError
from tiered_checkpoint_io.stores.directory import DirectoryStore

DATA = os.urandom(20 * CHUNK + 7)
(ENTRY,) = make_content("d/a.ckpt", DATA, 1).files


@pytest.fixture
def store(tmp_path):
    store = DirectoryStore(str(tmp_path))
    store.put("d/a.ckpt", DATA)
    return store


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
    fetch(watched, ENTRY, memoryview(buffer), concurrency=concurrency)
    assert buffer == DATA
    assert store.metrics.snapshot()["bytes.down"] == len(DATA)
    assert watched.most == min(concurrency, len(ENTRY.hashes))
    again = bytearray(len(DATA))
    fetch(store, unverified("d/a.ckpt", len(again)), memoryview(again), concurrency=concurrency)
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
        fetch(store, ENTRY, view, concurrency=3, write=writer_to(file.fileno()))
        assert view == DATA
        flip(tmp_path / "d" / "a.ckpt", 5 * CHUNK)
        with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
            fetch(store, ENTRY, view, concurrency=3, write=writer_to(file.fileno()))


@pytest.mark.parametrize("at", [0, 5 * CHUNK, len(DATA) - 1])
def test_a_flipped_bit_is_found_in_either_tier(store, tmp_path, at):
    flip(tmp_path / "d" / "a.ckpt", at)
    buffer = bytearray(len(DATA))
    with pytest.raises(CorruptCheckpointError, match=r"differ from their hash .*tier=durable.*d/a.ckpt"):
        fetch(store, ENTRY, memoryview(buffer), concurrency=4)
    with pytest.raises(CorruptCheckpointError, match=r"differ from their hash .*tier=memory"):
        verify(ENTRY, memoryview((tmp_path / "d" / "a.ckpt").read_bytes()), where="here")
    verify(ENTRY, memoryview(DATA), where="here")


def test_a_short_object_is_corrupt(store, tmp_path):
    os.truncate(tmp_path / "d" / "a.ckpt", len(DATA) - 1)
    with pytest.raises(CorruptCheckpointError, match="ends at"):
        fetch(store, ENTRY, memoryview(bytearray(len(DATA))), concurrency=4)


@pytest.mark.parametrize("concurrency", [1, 12])
def test_the_first_failure_stops_the_rest(store, concurrency):
    faulty = FaultyStore(store, fail_at=3)
    with failing("unavailable", match="injected at operation"):
        fetch(faulty, ENTRY, memoryview(bytearray(len(DATA))), concurrency=concurrency)
    assert 3 <= faulty.operations < 3 + concurrency


def test_the_ranges_of_a_huge_file_are_worked_out_once():
    class Counting(type(ENTRY)):
        asked = 0

        @property
        def chunks(self):
            Counting.asked += 1
            return super().chunks

    entry = Counting(ENTRY.path, ENTRY.size, ENTRY.chunk_size, ENTRY.hashes)
    verify(entry, memoryview(DATA), where="here")
    assert Counting.asked == 1


def test_a_temporary_file_goes_where_its_filling_fails(tmp_path):
    with failing("unavailable"), temporary_file(tmp_path, 10):
        raise StoreError("gone", reason="unavailable")
    assert not list(tmp_path.iterdir())
    with pytest.raises(RestoreError, match="no room"), temporary_file(tmp_path, 1 << 60):
        pass
    assert not list(tmp_path.iterdir())
    with temporary_file(tmp_path, 10) as (path, view):
        view[:] = b"0123456789"
    assert path.read_bytes() == b"0123456789"
    drop_temporary(path)
    assert not list(tmp_path.iterdir())
