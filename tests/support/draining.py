"""A memory tier with parts of raw bytes in it, and a durable tier to drain them to."""

import contextlib
import logging
import threading
from dataclasses import replace

from support.sharded import make_part, whole
from support.story import op_id
from support.supporting import build

from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import names_of
from tiered_checkpoint_io.memory.node import write_atomic
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import chunk_ranges, chunk_size_for, hash_bytes
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part
from tiered_checkpoint_io.stores import place_of

LOG = logging.getLogger("test")


def drain(node, store=None, **options):
    """Returns a drain of a node, to be run here; with this store instead of the node's own."""
    opened = {} if store is None else {"open_store": lambda *_: store}
    return Drain(node.root, logger=LOG, **opened, **options)


@contextlib.contextmanager
def working(node, store=None, *, stay=True, **options):
    """Runs a drain during the block; without ``stay`` it may end before."""
    stop = threading.Event()
    thread = threading.Thread(target=drain(node, store, stop=stop, stay=stay, **options).run)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def part_of(name, data, number, dirpath):
    chunk_size = chunk_size_for(len(data))
    hashes = tuple(hash_bytes(data[start : start + size]) for start, size in chunk_ranges(len(data), chunk_size))
    entry = FileEntry(name, len(data), chunk_size, hashes)
    content = Content(op_id(number), number, 0, "full", 1.0, 1, {}, (entry,), switch=entry.basename)
    return Part(name, 0, content, dirpath, durable=True)


def where_of(root):
    """Returns the options of a command that name a memory tier."""
    return "--memory-dir", str(root.parents[1]), "--namespace", root.name


class Node:
    """One node's memory tier, as a trainer fills it; operations are numbered in order."""

    def __init__(self, memory_dir, dirpath, *, namespace="default", **options):
        self.dirpath = dirpath
        self.tier = MemoryTier.open(memory_dir, namespace)
        self.root = self.tier.root
        self.queue = Queue(self.root)
        self.config = self.config_of(memory_dir, dirpath, namespace=namespace, **options)
        self.server = place_of(self.config).server
        write_atomic(self.root / "drain.json", self.config.to_json().encode())
        self.number, self.followed = 0, ""

    @property
    def where(self):
        return where_of(self.root)

    @staticmethod
    def config_of(memory_dir, dirpath, **options):
        return build(TieredCheckpointConfig.from_any, dirpath=dirpath, memory_dir=memory_dir, **options)

    def commit(self, part, files):
        """Puts a part into memory, with the bytes of its files."""
        slots = {basename: self.tier.acquire(len(data)) for basename, data in files.items()}
        for basename, slot in slots.items():
            slot.view[: len(files[basename])] = files[basename]
        self.followed = part.save_id if part.durable else self.followed
        return self.tier.commit(part, slots).op_id

    def save(self, name, data, *, durable=True, **facts):
        self.number += 1
        part = part_of(name, data, self.number, self.dirpath)
        part = replace(part, durable=durable, server=self.server, content=replace(part.content, **facts))
        return self.commit(part, {name.rpartition("/")[2]: data})

    def part(self, name, number, rank, **options):
        """Returns one rank's part of the save ``number``, as :func:`support.sharded.make_part` makes it."""
        part, files = make_part(name, number, rank, dirpath=self.dirpath, **options)
        self.number = max(self.number, number)
        return self.commit(replace(part, server=self.server), files)

    def request(self, action, name, target=""):
        self.number += 1
        self.queue.submit(Request(op_id(self.number), action, name, self.dirpath, target, server=self.server))
        return op_id(self.number)

    def alias(self, name, target):
        return self.request("alias", name, target)

    def delete(self, name):
        return self.request("delete", name, self.followed)

    def cancel(self, save_id):
        return self.request("cancel", "cancel", save_id)

    def drain(self):
        """Uploads what is queued, as the run's own drain does."""
        Drain(self.root).run(once=True)

    def states(self):
        return {outcome.op_id: outcome.state for outcome in self.queue.outcomes()}


def readable(store, name):
    """Returns the bytes that a reader finds whole under a name; None if absent."""
    content = whole(store, name)
    return content and store.get(files_of(store, content).all()[0].path)


def names(store):
    """Returns the checkpoints of a durable tier; a reservation is none."""
    return sorted(names_of(store))


def objects(store):
    return sorted(entry.key for entry in store.list("") if not entry.key.startswith(".tiered/"))
