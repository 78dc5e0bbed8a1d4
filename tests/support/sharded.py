"""Parts of sharded checkpoints with random bytes, one or more files a rank, and readers of them."""

import functools
import random

from support.store_contract import MemoryJournal
from support.story import op_id

from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import MIN_CHUNK_SIZE, chunk_ranges, hash_bytes
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Part
from tiered_checkpoint_io.stores.base import ObjectInfo
from tiered_checkpoint_io.stores.directory import DirectoryStore

CHUNK = 1 << 10
#: Above the smallest part size, so that uploads to S3 go in several parts.
LARGE = 18 << 20


@functools.cache
def bytes_of(number, rank, basename, size=1500):
    return random.Random(f"{number} {rank} {basename}").randbytes(size + 10 * rank + number)


def entry_of(path, data):
    chunk = CHUNK if len(data) < LARGE else MIN_CHUNK_SIZE
    hashes = tuple(hash_bytes(data[start : start + size]) for start, size in chunk_ranges(len(data), chunk))
    return FileEntry(path, len(data), chunk, hashes)


def make_part(
    name,
    number,
    rank,
    *,
    world_size=2,
    coordinator=0,
    kind="sharded",
    suffix="",
    dirpath="d",
    run=None,
    size=1500,
    series="",
):
    """Returns a rank's part and files: two of data of about ``size`` bytes, and the coordinator's ``.metadata``."""
    basenames = [f"__{rank}_0{suffix}.distcp", f"__{rank}_1{suffix}.distcp"]
    if kind == "sharded" and rank == coordinator:
        basenames.append(METADATA)
    files = {basename: bytes_of(number, rank, basename, size) for basename in basenames}
    entries = tuple(entry_of(f"{name}/{basename}", data) for basename, data in files.items())
    save_id = ids.save_id(run, number) if run else op_id(number)
    facts = {"parts": world_size, "coordinator": coordinator, "switch": METADATA if kind == "sharded" else None}
    content = Content(save_id, number, 0, kind, 1.0, world_size, {}, entries, **facts)
    return Part(name, rank, content, dirpath, durable=True, series=series), files


class Journals:
    """The journals of one story, by what they belong to."""

    def __init__(self):
        self._all = {}

    def of(self, *what):
        return self._all.setdefault(what, MemoryJournal())

    def left(self):
        return [what for what, journal in self._all.items() if journal.read() is not None]


def full_part(name, number):
    data = bytes_of(number, 0, "full")
    entry = entry_of(name, data)
    content = Content(op_id(number), number, 0, "full", 1.0, 1, {}, (entry,), switch=entry.basename)
    return Part(name, 0, content, "d", True), {name.rpartition("/")[2]: data}


def views_of(files):
    return {basename: memoryview(data) for basename, data in files.items()}


def whole(store, name):
    """Returns the content whose files are all there under a name, and match; None if absent."""
    manifest = read_manifest(store, name)
    if manifest is not None and manifest.alias_of:
        manifest = read_manifest(store, manifest.alias_of)
    if manifest is None or manifest.alias_of:
        return None
    for content in (manifest.content, *manifest.previous):
        if all(_matches(store, entry) for entry in files_of(store, content).all()):
            return content
    raise AssertionError(f"{name} matches none of its contents")


def readable(store, name):
    """Returns the step of the save that a reader finds whole under a name; None if absent."""
    content = whole(store, name)
    return content and content.step


def named(store):
    """Returns all keys that a durable tier should have, besides manifests: the keys that valid manifests name."""
    names = (ids.name_from_manifest_key(entry.key) for entry in store.list(ids.MANIFEST_PREFIX))
    read = {name: read_manifest(store, name) for name in names}
    manifests = {name: manifest for name, manifest in read.items() if manifest is not None}
    keys = set()
    for manifest in manifests.values():
        if manifest.alias_of is None:
            for content in (manifest.content, *manifest.previous):
                keys |= set(files_of(store, content).sizes)
                if content.index:
                    keys |= {entry.key for entry in store.list(ids.save_prefix(content.save_id))}
    return sorted(keys)


def objects(store):
    """Returns all keys of a durable tier, besides manifests."""
    return sorted(entry.key for entry in store.list("") if not entry.key.startswith(ids.MANIFEST_PREFIX))


def incomplete(store):
    """Descriptions of saves that no manifest names."""
    return sorted(key for key in set(objects(store)) - set(named(store)) if key.startswith(ids.SAVES_PREFIX))


def _matches(store, entry):
    try:
        data = store.get(entry.path)
    except FileNotFoundError:
        return False
    return len(data) == entry.size and tuple(hash_bytes(data[s : s + n]) for s, n in entry.chunks) == entry.hashes


class FlatStore(DirectoryStore):
    """Keys without folders, as on S3: a name may be an object, and have others below it."""

    def _path(self, key):
        super()._path(key)
        return f"{self._root}/{key.replace('/', '%')}"

    children = None

    def list(self, prefix):
        for entry in super().list(""):
            key = entry.key.replace("%", "/")
            if key.startswith(prefix):
                yield ObjectInfo(key, entry.size, entry.modified)
