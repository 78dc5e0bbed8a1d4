"""Checkpoints made by hand, and ranks as threads, for tests of restore."""

import itertools
import json
import pickle
import queue
import threading

from tiered_checkpoint_io.engine.durable.commit import commit
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import dump
from tiered_checkpoint_io.model.hashing import chunk_ranges, hash_bytes
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Part

RUN = ids.new_run_id(now=1_700_000_000.0)
CHUNK = 1 << 16
#: Bytes of what a rank tells all others at once, at most.
SMALL = 2048


def save_id(number):
    return ids.save_id(RUN, number)


def make_content(name, data, number, *, chunk=CHUNK, kind="full"):
    hashes = tuple(hash_bytes(data[start : start + length]) for start, length in chunk_ranges(len(data), chunk))
    entry = FileEntry(name, len(data), chunk, hashes)
    switch = {"full": entry.basename, "sharded": METADATA, "local": None}[kind]
    return Content(save_id(number), number, 0, kind, 1.0, 1, {}, (entry,), switch=switch)


def into_memory(tier, dirpath, name, data, number, *, chunk=CHUNK):
    """Commits a checkpoint to a node's memory; returns where its file lies."""
    content = make_content(name, data, number, chunk=chunk)
    (entry,) = content.files
    slot = tier.acquire(len(data))
    slot.view[: len(data)] = data
    stored = tier.commit(Part(name, 0, content, dirpath, durable=False), {entry.basename: slot})
    return stored.file(entry.basename)


def into_durable(store, name, data, number, *, chunk=CHUNK):
    part = Part(name, 0, make_content(name, data, number, chunk=chunk), store.url, durable=True)
    commit(store, part, {part.content.files[0].basename: memoryview(data)})


def of_a_newer_release(document, version=3):
    """A stored manifest or part, as a later version of the package would write it, in another format."""
    raw = json.loads(document)
    del raw["digest"]
    return dump({**raw, "version": version})


def flip(path, at=100):
    """Flips one bit of a file, behind everyone's back."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


class ThreadGroup(Group):
    """One rank of a group of threads; what it exchanges goes through pickle, as between processes."""

    def __init__(self, rank, node, shared):
        super().__init__(node)
        self.rank = rank
        self.world_size = shared["size"]
        self._shared = shared

    def _all_gather(self, obj):
        data = pickle.dumps(obj)
        # Of thousands of ranks, each gets as much of all others.
        assert len(data) <= SMALL, f"{len(data)} bytes go from each rank to all: {str(obj)[:200]}"
        return list(map(pickle.loads, self._exchange(data)))

    def _gather(self, obj, to):
        gathered = self._exchange(pickle.dumps(obj))
        return list(map(pickle.loads, gathered)) if self.rank == to else None

    def _share_bytes(self, data, size, source):
        return memoryview(self._exchange(data)[source][:size])

    def _exchange(self, data):
        slots = self._shared["slots"]
        slots[self.rank] = data
        self._shared["barrier"].wait()
        exchanged = list(slots)
        self._shared["barrier"].wait()
        return exchanged

    def transfer(self, sent, received):
        if sent is not None:
            data, rank = sent
            self._shared["mail"][self.rank, rank].put(bytes(data))
        if received is not None:
            data, rank = received
            data[:] = self._shared["mail"][rank, self.rank].get(timeout=30)


def in_ranks(nodes, work, timeout_s=30.0):
    """Runs ``work(group)`` on one rank per entry of ``nodes``; what each returned or raised, by rank."""
    shared = {
        "size": len(nodes),
        "slots": [b""] * len(nodes),
        "barrier": threading.Barrier(len(nodes), timeout=timeout_s),
        "mail": {pair: queue.Queue() for pair in itertools.permutations(range(len(nodes)), 2)},
    }
    results = [None] * len(nodes)

    def run(rank):
        try:
            results[rank] = work(ThreadGroup(rank, nodes[rank], shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    return results
