"""Costs of a large job at the durable tier: of a commit, a discovery, a choice, and one rank's restore.

A checkpoint of 16,384 parts of 1 GiB is committed as the drain of the coordinator does it, once the descriptions of all
other parts are there, beside 31 others of which only heads and indexes exist; then one rank restores its part. Then
32 full checkpoints of 100 GiB are discovered. Nothing holds the bytes of the files: their sizes are listed, and the
hashes are random. The store is rclone's S3 on this machine, or a directory.

Prints, last, ``head_bytes=… discovery_bytes=… discovery_s=… choice_s=… restore_index_bytes=… commit_requests=…``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tiered_checkpoint_io.engine.durable.commit import commit
from tiered_checkpoint_io.engine.durable.files import Arrivals, files_of
from tiered_checkpoint_io.engine.durable.sweep import Survey, sweep, written
from tiered_checkpoint_io.engine.restore.catalog import Tiers, discover
from tiered_checkpoint_io.engine.restore.choice import Catalog, Held, Selector, choose
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import chunk_ranges, chunk_size_for, hash_bytes
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Index, IndexRow, Manifest, Part
from tiered_checkpoint_io.stores import Store, open_store
from tiered_checkpoint_io.stores.base import Metrics, ObjectInfo

GIB = 1 << 30
FULL_BYTES = 100 * GIB
CHECKPOINTS = 32
#: Parts of one node: a rank that restores has those of its node in its memory.
_RANKS_OF_A_NODE = 8
#: Keys in one answer of S3 to a LIST.
_PAGE = 1000
_RUN = ids.new_run_id()
_RANDOM = random.Random(16_384)
_METADATA = b"where each tensor lies"


class Described:
    """A store that has the objects of another one, and files of which there is nothing but the size."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sizes: dict[str, int] = {}
        self.metrics = Metrics()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix.startswith(ids.META_PREFIX):
            return self._store.list(prefix)
        found = [ObjectInfo(key, size, 0.0) for key, size in self.sizes.items() if key.startswith(prefix)]
        self.metrics.add("requests.list", -(-len(found) // _PAGE))
        return iter(found)

    def upload(self, key: str, data: memoryview, **_: Any) -> None:
        self.metrics.add("requests.put")
        self.sizes[key] = len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def entry_of(path: str, size: int) -> FileEntry:
    chunk_size = chunk_size_for(size)
    hashes = tuple(f"{_RANDOM.getrandbits(128):032x}" for _ in chunk_ranges(size, chunk_size))
    return FileEntry(path, size, chunk_size, hashes)


def part_of(number: int, rank: int, parts: int) -> Part:
    """The description of one rank's part of a sharded checkpoint."""
    name = f"step_{number}"
    files = [entry_of(f"{name}/__{rank}_0-{number:08d}.distcp", GIB)]
    if rank == 0:
        files.append(FileEntry(f"{name}/{METADATA}", len(_METADATA), 1 << 24, (hash_bytes(_METADATA),)))
    content = Content(ids.save_id(_RUN, number), number, 0, "sharded", time.time(), parts, {}, tuple(files))
    return Part(name, rank, content, "s3://bucket/run", durable=True)


def put_full(store: Store, number: int) -> None:
    """The head, index and description of a full checkpoint, as its commit leaves them."""
    name = f"full_{number}.ckpt"
    entry = entry_of(name, FULL_BYTES)
    content = Content(ids.save_id(_RUN, number), number, 0, "full", time.time(), 1, {}, (entry,))
    part = Part(name, 0, content, "s3://bucket/run", durable=True)
    data, reference = Index(name, part.save_id, {0: IndexRow.of(part)}).to_json()
    store.put(ids.description_key(part.save_id, 0), part.to_json())
    store.put(ids.index_key(part.save_id), data)
    head = Manifest(name, replace(part.content, files=(), index=reference))
    store.put(ids.manifest_key(name), head.to_json())


def discovered(store: Store) -> list[Manifest]:
    """Returns the manifests that a restart reads before it chooses, by the product's discovery: a list, and heads."""
    config, log = TieredCheckpointConfig.from_any(dirpath=store.url), logging.getLogger("scale")
    # Memory is looked at by another step, and not here.
    tiers = Tiers(config, cast("MemoryTier", None), lambda: store, store.url, log)
    known = discover(tiers, Selector("latest"), {})
    assert not known.rest, "one batch holds them all"
    if known.error is not None:
        raise known.error
    return known.manifests


def counted(store: Any, work: Callable[[], Any]) -> tuple[Any, float, dict[str, int]]:
    """Returns the result of some work, its seconds, and its requests to the store."""

    def snapshot() -> dict[str, int]:
        both = [store.metrics.snapshot(), store._store.metrics.snapshot()]
        return {key: sum(each.get(key, 0) for each in both) for key in {*both[0], *both[1]}}

    before, started = snapshot(), time.monotonic()
    result = work()
    seconds = time.monotonic() - started
    return result, seconds, {key: count - before.get(key, 0) for key, count in snapshot().items()}


def requests(counts: dict[str, int]) -> str:
    asked = {
        key.partition(".")[2]: count for key, count in sorted(counts.items()) if key.startswith("requests.") and count
    }
    return " ".join(f"{key}={count}" for key, count in asked.items())


def run(store: Any, parts: int) -> dict[str, str]:
    """All measurements; what the last line says."""
    say = print
    descriptions = [part_of(CHECKPOINTS, rank, parts) for rank in range(parts)]
    rows = {part.rank: IndexRow.of(part) for part in descriptions}
    for number in range(1, CHECKPOINTS):
        # As CHECKPOINTS saves of the same shape leave them; their descriptions are not read here.
        save_id = ids.save_id(_RUN, number)
        data, reference = Index(f"step_{number}", save_id, rows).to_json()
        content = Content(save_id, number, 0, "sharded", time.time(), parts, {}, (), parts=parts, index=reference)
        store.put(ids.index_key(save_id), data)
        store.put(ids.manifest_key(f"step_{number}"), Manifest(f"step_{number}", content).to_json())
    for part in descriptions:
        store.sizes |= {entry.path: entry.size for entry in part.content.files if entry.basename != METADATA}
    in_parallel(lambda part: store.put(ids.description_key(part.save_id, part.rank), part.to_json()), descriptions[1:])
    own = descriptions[0]
    store.put(ids.description_key(own.save_id, 0), own.to_json())

    def whole_commit() -> None:
        arrivals = Arrivals(own)
        arrivals.look(store)
        assert not arrivals.missing
        commit(store, own, {METADATA: memoryview(_METADATA)}, arrivals.rows)
        sweep(store, Survey(), before=written(store, ids.manifest_key(own.name)) - 3600.0)

    _, seconds, counts = counted(store, whole_commit)
    commit_requests = sum(count for key, count in counts.items() if key.startswith("requests."))
    say(f"commit of {parts} parts: {commit_requests} requests ({requests(counts)}), {seconds:.1f} s")
    head = store.get(ids.manifest_key(own.name))
    index = store.get(ids.index_key(own.save_id))
    say(f"head: {len(head)} bytes; index: {len(index)} bytes; a description: {len(descriptions[1].to_json())} bytes")

    known, discovery_s, counts = counted(store, lambda: discovered(store))
    discovery_bytes = counts["bytes.down"]
    say(f"discovery of {len(known)} sharded: {discovery_bytes} bytes, {discovery_s:.2f} s ({requests(counts)})")
    memory: dict[str, list[Held]] = {}
    for part in descriptions:
        node = f"node{part.rank // _RANKS_OF_A_NODE}"
        memory.setdefault(node, []).append(Held(part.name, part.rank, part.content, part.commits))
    (best, *_), choice_s, _ = counted(store, lambda: choose(Catalog(memory, known), Selector("latest"), "sharded"))
    assert best.save_id == own.save_id
    say(f"choice among the parts of {parts} ranks and {len(known)} heads: {choice_s:.2f} s")

    content = next(each.content for each in known if each.name == own.name)
    entries, seconds, counts = counted(store, lambda: files_of(store, content).of_rank(parts - 1))
    assert entries == descriptions[-1].content.files
    restore_index_bytes = counts["bytes.down"]
    say(f"the files of one rank: {restore_index_bytes} bytes, {seconds:.2f} s ({requests(counts)})")
    return {
        "head_bytes": str(len(head)),
        "discovery_bytes": str(discovery_bytes),
        "discovery_s": f"{discovery_s:.2f}",
        "choice_s": f"{choice_s:.2f}",
        "restore_index_bytes": str(restore_index_bytes),
        "commit_requests": str(commit_requests),
    }


def run_full(store: Any) -> None:
    """Discovery of full checkpoints of 100 GiB, whose hashes would be 240 KB each."""
    for number in range(1, CHECKPOINTS + 1):
        put_full(store, number)
    known, seconds, counts = counted(store, lambda: discovered(store))
    print(
        f"discovery of {len(known)} full ones of 100 GiB: {counts['bytes.down']} bytes, {seconds:.2f} s"
        f" ({requests(counts)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=int, default=16_384)
    parser.add_argument("--directory", action="store_true", help="a directory instead of S3")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tiered-scale-"))
        urls = [f"{folder}/sharded", f"{folder}/full"]
        if not arguments.directory:
            sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
            from support.rclone_server import RcloneServer

            server = stack.enter_context(RcloneServer(folder))
            os.environ.update(server.env())
            bucket = server.make_bucket("scale")
            urls = [f"{bucket}/sharded", f"{bucket}/full"]
        else:
            for url in urls:
                Path(url).mkdir()
        stores = [Described(open_store(TieredCheckpointConfig.from_any(dirpath=url))) for url in urls]
        measured = run(stores[0], arguments.parts)
        run_full(stores[1])
        for store in stores:
            store.close()
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    print(" ".join(f"{key}={value}" for key, value in measured.items()))


if __name__ == "__main__":
    main()
