"""Checkpoints made by hand, and ranks as threads, for tests of restore."""

import json
import logging
import os
import pickle
import threading
import time
from pathlib import Path

from support.supporting import build

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.serving import Server, ask_to_serve, endpoint_of
from tiered_checkpoint_io.engine.durable.commit import commit
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.engine.restore.restore import restore
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import chunk_ranges, dump, hash_bytes
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Part
from tiered_checkpoint_io.stores.directory import DirectoryStore

RUN = ids.new_run_id(now=1_700_000_000.0)
CHUNK = 1 << 16
#: Most bytes of a rank's message to all others.
SMALL = 2048
LATEST = Selector("latest")
OLD, NEW = os.urandom(3 * CHUNK + 5), os.urandom(3 * CHUNK + 9)


def save_id(number):
    return ids.save_id(RUN, number)


def make_content(name, data, number, *, chunk=CHUNK, kind="full"):
    hashes = tuple(hash_bytes(data[start : start + length]) for start, length in chunk_ranges(len(data), chunk))
    entry = FileEntry(name, len(data), chunk, hashes)
    switch = {"full": entry.basename, "sharded": METADATA, "local": None}[kind]
    return Content(save_id(number), number, 0, kind, 1.0, 1, {}, (entry,), switch=switch)


def into_memory(tier, dirpath, name, data, number, *, chunk=CHUNK):
    """Commits a checkpoint to a node's memory; returns the path of its file."""
    content = make_content(name, data, number, chunk=chunk)
    (entry,) = content.files
    slot = tier.acquire(len(data))
    slot.view[: len(data)] = data
    stored = tier.commit(Part(name, 0, content, dirpath, durable=False), {entry.basename: slot})
    return stored.file(entry.basename)


def into_durable(store, name, data, number, *, chunk=CHUNK):
    part = Part(name, 0, make_content(name, data, number, chunk=chunk), store.url, durable=True)
    commit(store, part, {part.content.files[0].basename: memoryview(data)})


def served(tier):
    """Serves a node's memory from this process, for as long as it runs; returns the endpoint."""
    ask_to_serve(tier.root, "127.0.0.1")
    Server(tier.root, tier, logging.getLogger("test"), SYSTEM).look()
    return endpoint_of(tier.root)


def of_a_newer_release(document, version=3):
    """Returns a stored manifest or part, as a later version of the package would write it, in another format."""
    raw = json.loads(document)
    del raw["digest"]
    return dump({**raw, "version": version})


class OneObject:
    """A store of one object, which notes what is read of it, and may be slow."""

    url = "store"

    def __init__(self, data, *, wait_s=0.0):
        self.data, self.wait_s = data, wait_s
        self.asked, self.down = [], 0

    def read_into(self, key, offset, buffer):
        self.asked.append(offset)
        self.down += len(buffer)
        time.sleep(self.wait_s)
        buffer[:] = self.data[offset : offset + len(buffer)]


def flip(path, at=100):
    """Flips one bit of a file, behind everyone's back, as a disk does: its times stay."""
    facts = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


class ThreadGroup(Group):
    """One rank of a group of threads; what it exchanges goes through pickle, as between processes."""

    def __init__(self, rank, node, shared):
        self.rank, self.node = rank, node
        self.world_size = shared["size"]
        self._shared = shared

    def arrive(self, node="", what=""):
        nodes = self._exchange(node)
        self.is_first_here = nodes.index(node) == self.rank
        self.has_other_nodes = len(set(nodes)) > 1

    def _all_gather(self, obj):
        data = pickle.dumps(obj)
        # Of thousands of ranks, each gets as much of all others.
        assert len(data) <= SMALL, f"{len(data)} bytes go from each rank to all: {str(obj)[:200]}"
        return list(map(pickle.loads, self._exchange(data)))

    def _gather(self, obj):
        gathered = self._exchange(pickle.dumps(obj))
        return list(map(pickle.loads, gathered)) if self.rank == 0 else None

    def _broadcast(self, obj):
        return pickle.loads(self._exchange(pickle.dumps(obj))[0])

    def _exchange(self, data):
        slots = self._shared["slots"]
        slots[self.rank] = data
        self._shared["barrier"].wait()
        exchanged = list(slots)
        self._shared["barrier"].wait()
        return exchanged


def in_ranks(nodes, work, timeout_s=30.0):
    """Runs ``work(group)`` on one rank per entry of ``nodes``; returns each result or error, by rank."""
    shared = {
        "size": len(nodes),
        "slots": [b""] * len(nodes),
        "barrier": threading.Barrier(len(nodes), timeout=timeout_s),
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


def bytes_of(restored):
    return restored.path.read_bytes()


class World:
    """Nodes, each with a memory of its own, and one durable tier."""

    def __init__(self, base, durable):
        self.base = Path(base)
        self.store = DirectoryStore(durable)
        self.tiers = {}

    def tier(self, node="n", **options):
        if node not in self.tiers or options:
            folder = self.base / node
            folder.mkdir(exist_ok=True)
            self.tiers[node] = MemoryTier.open(str(folder), "default", **options)
        return self.tiers[node]

    def tiers_of(self, node="n", store=None, dirpath=None):
        """Returns the tiers of a restore on a node."""
        config = build(
            TieredCheckpointConfig, dirpath=self.store.url, memory_dir=str(self.base / node), wait_timeout_s=20
        )
        tier, log = self.tier(node), logging.getLogger("test")
        return Tiers(
            config, tier, lambda: store or self.store, dirpath or self.store.url, log, serve=lambda: served(tier)
        )

    def restorer(self, node="n", store=None, dirpath=None, read=bytes_of):
        """Returns a function that restores on one rank; it returns the restored checkpoint and what ``read`` does."""
        tiers = self.tiers_of(node, store, dirpath)
        return lambda selector, group, **more: restore(lambda: (tiers, selector), group, read, **more)

    def restore(self, selector=LATEST, node="n", store=None):
        """Restores on one rank; returns the restored checkpoint and its bytes."""
        return self.restorer(node, store)(selector, Group()) or (None, None)

    def restore_all(self, nodes, selector=LATEST, stores=None):
        """Restores on all ranks; returns each result or error."""
        for node in nodes:
            self.tier(node)

        def work(group):
            found = self.restorer(group.node, (stores or {}).get(group.rank))(selector, group)
            return found and (found[0].content.save_id, found[0].tier, found[1])

        return in_ranks(nodes, work)
