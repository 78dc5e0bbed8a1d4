"""Chunks that a node fetches: each once, whoever needs it first, and none unverified."""

import fcntl
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered_checkpoint_io.engine.restore.shared_reads import FetchedFile, SharedFolder, clear_reads
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError, StoreError
from tiered_checkpoint_io.model.hashing import chunk_ranges, hash_bytes
from tiered_checkpoint_io.model.manifest import FileEntry

CHUNK = 1000
DATA = os.urandom(10 * CHUNK + 7)
ENTRY = FileEntry(
    "step_1/file", len(DATA), CHUNK, tuple(hash_bytes(DATA[a : a + n]) for a, n in chunk_ranges(len(DATA), CHUNK))
)


class Durable:
    """A store of one object: counts what is read, and is slow, broken or wrong where it is told to be."""

    url = "store"

    def __init__(self, data=DATA, *, wait_s=0.0):
        self.data = data
        self.wait_s = wait_s
        self.asked = []
        self.broken = False

    def read_into(self, key, offset, buffer):
        self.asked.append(offset)
        time.sleep(self.wait_s)
        if self.broken:
            raise StoreError("503", operation="get", tier="durable", key=key, reason="unavailable")
        buffer[:] = self.data[offset : offset + len(buffer)]


def opened(folder, store, *, timeout_s=10.0, concurrency=4):
    return FetchedFile(ENTRY, lambda: store, folder.path, concurrency=concurrency, timeout_s=timeout_s)


@pytest.fixture
def folder(tmp_path):
    folder = SharedFolder(tmp_path, "save")
    yield folder
    folder.close()


def test_readers_of_a_node_fetch_each_chunk_once(folder):
    store = Durable(wait_s=0.01)
    files = [opened(folder, store) for _ in range(4)]
    threads = [threading.Thread(target=file.ensure, args=([(0, len(DATA))],)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(store.asked) == [offset for offset, _ in ENTRY.chunks]
    assert all(bytes(file.view[: len(DATA)]) == DATA for file in files)
    for file in files:
        file.close()


def test_a_chunk_that_differs_from_its_hash_is_refused_each_time(folder):
    bad = bytearray(DATA)
    bad[2500] ^= 1
    file = opened(folder, Durable(bytes(bad)))
    file.ensure([(0, 2000)])
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
            file.ensure([(2400, 10)])
    with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
        file.put(2, bad[2000:3000])
    file.put(2, DATA[2000:3000])
    file.ensure([(2400, 10)])
    file.close()


def test_the_wait_for_another_reader_is_bounded(folder):
    slow, quick = Durable(wait_s=1.0), Durable()
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
    assert second.path.exists(), "somebody reads from it"
    second.close()
    assert not second.path.exists()


def left_behind(root):
    """A folder as a power loss leaves it: what says that chunks are verified is on the disk, and the chunks are not."""
    child = os.fork()
    if not child:
        file = opened(SharedFolder(root, "save"), Durable())
        file.ensure([(0, len(DATA))])
        file.view[: len(DATA)] = bytes(len(DATA))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (path,) = (root / "reads").iterdir()
    return path


def joined_and_read(root):
    folder = SharedFolder(root, "save")
    file = opened(folder, Durable())
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


@pytest.mark.parametrize("dies", [False, True])
def test_a_folder_that_another_rank_is_removing_is_not_joined(tmp_path, dies):
    path = left_behind(tmp_path)
    clearing = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(clearing, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(joined_and_read, tmp_path)
        time.sleep(0.2)
        assert not read.done()
        if not dies:
            shutil.rmtree(path)
        os.close(clearing)
        assert read.result(30) == DATA


def test_nobody_waits_until_the_bytes_of_the_dead_are_gone(tmp_path, monkeypatch):
    left_behind(tmp_path)
    removing, may_end, remove = threading.Event(), threading.Event(), shutil.rmtree

    def slow(*args, **options):
        removing.set()
        assert may_end.wait(30)
        remove(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(SharedFolder, tmp_path, "save")
        assert removing.wait(30)
        folder = SharedFolder(tmp_path, "save")
        may_end.set()
        other.result(30).close()
    folder.close()
    assert not list((tmp_path / "reads").iterdir())
