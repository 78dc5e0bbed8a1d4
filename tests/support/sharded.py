"""Parts of sharded checkpoints with random bytes, one or more files a rank, and readers of them."""

import functools
import random

from support.story import op_id

from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.hashing import MIN_CHUNK_SIZE, chunk_ranges, hash_bytes
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
    name, number, rank, *, world_size=2, coordinator=0, kind="sharded", suffix="", dirpath="d", run=None, size=1500
):
    """A rank's part, and its files: two of data of about ``size`` bytes, and ``.metadata`` on the coordinator."""
    basenames = [f"__{rank}_0{suffix}.distcp", f"__{rank}_1{suffix}.distcp"]
    if kind == "sharded" and rank == coordinator:
        basenames.append(METADATA)
    files = {basename: bytes_of(number, rank, basename, size) for basename in basenames}
    entries = tuple(entry_of(f"{name}/{basename}", data) for basename, data in files.items())
    save_id = ids.save_id(run, number) if run else op_id(number)
    content = Content(save_id, number, 0, kind, 1.0, world_size, {}, entries)
    return Part(name, rank, content, dirpath, durable=True), files


def views_of(files):
    return {basename: memoryview(data) for basename, data in files.items()}


def readable(store, name):
    """Which save a reader finds whole under a name, by its number (the step); None if absent.

    All files of the content that is found must be there, and match.
    """
    manifest = commit.read_manifest(store, name)
    if manifest is None:
        return None
    if manifest.alias_of and (target := commit.read_manifest(store, manifest.alias_of)):
        manifest = target
    for content in (manifest.content, *manifest.previous):
        if all(_matches(store, entry) for entry in content.files):
            return content.step
    raise AssertionError(f"{name} matches none of its contents")


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

    def list(self, prefix):
        for entry in super().list(""):
            key = entry.key.replace("%", "/")
            if key.startswith(prefix):
                yield ObjectInfo(key, entry.size, entry.modified)
