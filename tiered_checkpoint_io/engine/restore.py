"""Restore: find the candidates, bring the best one to every node, verify it, and agree on it.

Rank 0 alone asks the durable tier what is there. On each node one process verifies or fetches;
the others map the same pages. A bad copy leads to the next source, then to the next candidate; it
is quarantined and reported, never loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.engine import fetch
from tiered_checkpoint_io.engine.choice import Candidate, Held, Selector, Tier, candidates
from tiered_checkpoint_io.engine.commit import read_manifest
from tiered_checkpoint_io.engine.coordination import Group, agree
from tiered_checkpoint_io.engine.queue import Queue
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    ManifestError,
    MemoryTierError,
    RestoreError,
    StoreError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger, gib, rate
from tiered_checkpoint_io.manifest import Content, Manifest, Part
from tiered_checkpoint_io.storage.base import Store
from tiered_checkpoint_io.storage.memory import MemoryTier, StoredPart

#: Manifests that are read at once when looking for the newest: those committed last.
_BATCH = 32
_READ_AT_ONCE = 8
_LOCK_POLL_S = 0.05


@dataclass(slots=True)
class Restored:
    """A checkpoint that lies, verified, on this node.

    Attributes:
        name: Its name.
        content: What it holds; None for a file that others wrote, which nothing verified.
        tier: Where this node had it from.
        path: The local file.
        seconds: How long it took to find, fetch and verify.
        bytes_read: Bytes that this process read from the durable tier.
        rejected: What was tried before it, and why it was not taken.
        newest_save_id: The newest save seen in any tier; later runs count on from there.
    """

    name: str
    content: Content | None
    tier: Tier
    path: Path
    seconds: float
    bytes_read: int
    rejected: list[str]
    newest_save_id: str | None
    _stored: StoredPart | None = field(default=None, repr=False)
    _temporary: Path | None = field(default=None, repr=False)

    @property
    def step(self) -> int:
        """The training step; -1 where the checkpoint does not tell."""
        return self.content.step if self.content else (ids.step_in_name(self.name) or -1)


@dataclass(slots=True)
class _Known:
    """What rank 0 learnt of the durable tier."""

    manifests: list[Manifest] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    foreign_size: int | None = None
    error: TieredCheckpointError | None = None


@dataclass(slots=True)
class _Brought:
    """How one node's leader fared with a candidate."""

    path: str | None = None
    tier: Tier = "memory"
    bytes_read: int = 0
    temporary: bool = False
    rejected: list[str] = field(default_factory=list)
    error: TieredCheckpointError | None = None


class Restorer:
    """Restores from one durable tier and the memory of the nodes."""

    def __init__(
        self,
        config: TieredCheckpointConfig,
        tier: MemoryTier,
        store: Callable[[], Store],
        logger: Logger,
        dirpath: str | None = None,
    ) -> None:
        """Takes the tiers.

        Args:
            config: For bounds and concurrency.
            tier: This node's memory.
            store: Opens the durable tier; called on rank 0, and where bytes are fetched.
            logger: Where to log.
            dirpath: The durable tier, where it is another than the configuration's.
        """
        self._config = config
        self._tier = tier
        self._store = store
        self._log = logger
        self._dirpath = dirpath or config.dirpath
        #: All names on the durable tier, where this rank listed them.
        self.listed: set[str] | None = None

    def restore(self, selector: Selector, group: Group) -> Restored | None:
        """Brings the checkpoint that ``selector`` means to every node.

        Every rank of ``group`` calls this, and all return the same checkpoint or raise the same
        error.

        Returns:
            None where no tier holds any, and each has said so.

        Raises:
            CheckpointNotFoundError: There is none of the name that was asked for.
            RestoreError: There are some, but none is intact.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            FormatVersionError: A newer release wrote what would have to be chosen.
        """
        started = time.monotonic()
        quarantined = self._quarantined()
        held, damaged = self._look_here()
        queued = self._queued_aliases()
        gathered: list[tuple[str, list[Held], list[str], dict[str, str], list[str]]] = group.all_gather(
            (group.node, held, damaged, queued, quarantined)
        )
        known: _Known = group.broadcast(self._discover(selector, queued) if group.rank == 0 else None)
        memory = {node: holdings for node, holdings, *_ in reversed(gathered)}
        aliases = gathered[0][3]
        rejected = [*known.rejected, *dict.fromkeys(line for entry in gathered for line in entry[2])]
        leader = min(rank for rank, entry in enumerate(gathered) if entry[0] == group.node)
        nodes = list(memory)
        seen = [e.content.save_id for holdings in memory.values() for e in holdings]

        while True:
            tried = candidates(memory, known.manifests, selector, aliases)
            self._check_error(known, tried, group)
            for candidate in tried:
                brought, notes = self._bring(candidate, group, leader, nodes)
                rejected += [note for note in notes if note not in rejected]
                if brought is not None:
                    seen += [manifest.content.save_id for manifest in known.manifests]
                    restored = self._describe(candidate, brought, rejected, started, max(seen, default=None))
                    self._report(restored, group)
                    return restored
            if not known.rest:
                break
            # None of the newest is intact: older ones are better than none.
            known = group.broadcast(self._read_more(known) if group.rank == 0 else None)
            memory = {node: [] for node in nodes}
            rejected += [note for note in known.rejected if note not in rejected]
        if selector.kind == "name" and not rejected:
            return self._foreign(selector, known, group, started)
        # What an earlier start found corrupt must not become a start from scratch on the next one.
        rejected += dict.fromkeys(line for entry in gathered for line in entry[4])
        if rejected:
            raise RestoreError(
                "no checkpoint is intact: " + "; ".join(rejected),
                operation="restore",
                key=self._dirpath,
                rank=group.rank,
                hint=f"corrupt parts of memory lie in {self._tier.root}/quarantine; to start from scratch,"
                " remove what is damaged",
            )
        return None

    # ------------------------------------------------------------------------------- discovery
    def _look_here(self) -> tuple[list[Held], list[str]]:
        """What this node's memory holds for this durable tier, and what of it is damaged."""
        held = [
            Held(stored.part.name, stored.part.content)
            for stored in self._tier.parts()
            if stored.part.dirpath == self._dirpath and stored.part.content.kind == "full"
        ]
        damaged = []
        for folder, error in self._tier.damaged():
            where = self._tier.quarantine(folder, str(error))
            damaged.append(f"memory {folder}: {error}; moved to {where}")
        return held, damaged

    def _quarantined(self) -> list[str]:
        return [f"memory {path}: corrupt" for path in sorted((self._tier.root / "quarantine").iterdir())]

    def _queued_aliases(self) -> dict[str, str]:
        requests = Queue(self._tier.root).requests()
        return {entry.name: entry.target for entry in requests if entry.action == "alias"}

    def _discover(self, selector: Selector, queued: dict[str, str]) -> _Known:
        known = _Known()
        try:
            store = self._store()
            if selector.kind == "name":
                self._discover_name(store, selector.name, known, queued)
            else:
                listed = sorted(store.list(ids.MANIFEST_PREFIX), key=lambda entry: entry.modified, reverse=True)
                names = [name for entry in listed if (name := ids.name_from_manifest_key(entry.key)) is not None]
                self.listed = set(names)
                known.rest = [name for name in names if selector.wants(name)]
                self._read_more(known, first=True)
        except TieredCheckpointError as error:
            known.error = error
        return known

    def _discover_name(self, store: Store, name: str, known: _Known, queued: dict[str, str]) -> None:
        for each in dict.fromkeys((name, queued.get(name, name))):
            manifest = read_manifest(store, each)
            if manifest is None:
                continue
            known.manifests.append(manifest)
            if manifest.alias_of is not None:
                target = read_manifest(store, manifest.alias_of)
                known.manifests += [target] if target is not None else []
        if not known.manifests:
            with contextlib.suppress(StoreNotFoundError):
                known.foreign_size = store.size(name)

    def _read_more(self, known: _Known, *, first: bool = False) -> _Known:
        """Reads the manifests of the next names; errors are part of the answer."""
        store = self._store()
        batch, known.rest = known.rest[:_BATCH], known.rest[_BATCH:]

        def read(name: str) -> Manifest | ManifestError | None:
            try:
                return read_manifest(store, name)
            except FormatVersionError:
                raise
            except ManifestError as error:
                return error

        try:
            with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="tiered-discover") as pool:
                results = list(pool.map(read, batch))
                present = {manifest.name for manifest in results if isinstance(manifest, Manifest)}
                targets = {m.alias_of for m in results if isinstance(m, Manifest) and m.alias_of} - present
                results += list(pool.map(read, sorted(targets)))
        except TieredCheckpointError as error:
            if first:
                raise
            known.error, known.manifests, known.rest = error, [], []
            return known
        known.manifests = [manifest for manifest in results if isinstance(manifest, Manifest)]
        known.rejected += [f"durable {error}" for error in results if isinstance(error, ManifestError)]
        return known

    def _check_error(self, known: _Known, tried: list[Candidate], group: Group) -> None:
        if known.error is None:
            return
        # Training must go on while S3 is away, if memory can carry it; but nobody may start from
        # scratch because S3 did not answer.
        if tried and known.error.retryable:
            if group.rank == 0:
                self._log.warning("restoring from memory alone: %s", known.error)
            return
        raise known.error

    # -------------------------------------------------------------------------------- bringing
    def _bring(
        self, candidate: Candidate, group: Group, leader: int, nodes: list[str]
    ) -> tuple[_Brought | None, list[str]]:
        """Has every node's leader bring a candidate; the outcome on this node, if all succeeded."""
        mine = self._bring_here(candidate, group.node) if group.rank == leader else None
        outcomes: list[tuple[str, _Brought | None]] = group.all_gather((group.node, mine))
        by_node = {node: brought for node, brought in outcomes if brought is not None}
        notes = [note for node in nodes for note in by_node[node].rejected]
        for brought in by_node.values():
            if brought.error is not None:
                raise brought.error
        if any(brought.path is None for brought in by_node.values()):
            return None, notes
        here = by_node[group.node]
        if group.rank != leader:
            here.bytes_read = 0
        return here, notes

    def _bring_here(self, candidate: Candidate, node: str) -> _Brought:
        result = _Brought()
        for tier in candidate.sources[node]:
            try:
                with self._node_lock():
                    bring = self._from_memory if tier == "memory" else self._from_durable
                    bring(candidate, result)
                result.tier = tier
                return result
            except (CorruptCheckpointError, CheckpointNotFoundError, StoreNotFoundError) as error:
                note = f"{tier} {candidate.name} (step {candidate.content.step}): {error}"
                result.rejected.append(note)
                self._log.error("not restored, looking further: %s", note)
            except (TieredCheckpointError, OSError) as error:
                result.error = (
                    error
                    if isinstance(error, TieredCheckpointError)
                    else RestoreError(f"{type(error).__name__}: {error}", operation="restore", key=candidate.name)
                )
                return result
        return result

    def _from_memory(self, candidate: Candidate, result: _Brought) -> None:
        stored = self._find(candidate.content.save_id)
        (entry,) = stored.part.content.files
        try:
            with self._tier.reading(stored) as views:
                fetch.verify(entry, views[entry.basename], where=str(stored.file(entry.basename)))
        except CorruptCheckpointError as error:
            self._tier.quarantine(stored.folder, str(error))
            raise
        result.path = str(stored.file(entry.basename))

    def _from_durable(self, candidate: Candidate, result: _Brought) -> None:
        (entry,) = candidate.content.files
        concurrency = self._config.read_concurrency()
        store = self._store()
        started = time.monotonic()
        # Another process of this node may have brought it while we waited for the lock.
        with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
            self._from_memory(candidate, result)
            return
        try:
            slot = self._tier.acquire(entry.size)
        except MemoryTierError as error:
            self._log.warning("fetching into a temporary file: %s", error)
            self._into_file(store, candidate, result, concurrency)
        else:
            try:
                fetch.fetch(store, entry, slot.view[: entry.size], concurrency=concurrency)
            except BaseException:
                self._tier.give_back(slot)
                raise
            part = Part(candidate.name, 0, candidate.content, self._dirpath, durable=True)
            stored = self._tier.commit(part, {entry.basename: slot}, drained=True)
            result.path = str(stored.file(entry.basename))
        result.bytes_read = entry.size
        self._log.info("fetched %s: %s", candidate.name, rate(entry.size, time.monotonic() - started))

    def _into_file(self, store: Store, candidate: Candidate, result: _Brought, concurrency: int) -> None:
        (entry,) = candidate.content.files
        with _temporary_file(entry.size) as (path, view):
            fetch.fetch(store, entry, view, concurrency=concurrency)
        result.path, result.temporary = str(path), True

    def _find(self, save_id: str) -> StoredPart:
        for stored in self._tier.parts():
            if stored.save_id == save_id:
                return stored
        raise CheckpointNotFoundError("no longer in memory", operation="restore", tier="memory", key=save_id)

    @contextlib.contextmanager
    def _node_lock(self) -> Iterator[None]:
        """One process of a node at a time verifies or fetches, also where no group orders them."""
        path = self._tier.root / "restore.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + self._config.wait_timeout_s
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise RestoreError(
                            "another process of this node did not finish restoring in time",
                            operation="restore",
                            key=str(path),
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    # ---------------------------------------------------------------------------------- results
    def _describe(
        self, candidate: Candidate, brought: _Brought, rejected: list[str], started: float, newest: str | None
    ) -> Restored:
        assert brought.path is not None
        path = Path(brought.path)
        stored = None if brought.temporary else self._find(candidate.content.save_id)
        return Restored(
            candidate.name,
            candidate.content,
            brought.tier,
            path,
            time.monotonic() - started,
            brought.bytes_read,
            rejected,
            newest,
            stored,
            path if brought.temporary else None,
        )

    def _report(self, restored: Restored, group: Group) -> None:
        if group.rank == 0:
            assert restored.content is not None
            self._log.info(
                "Step %d: resuming from %s (%s, %s) after %.2f s",
                restored.step,
                restored.name,
                restored.tier,
                gib(restored.content.size),
                restored.seconds,
            )

    def _foreign(self, selector: Selector, known: _Known, group: Group, started: float) -> Restored:
        """A full checkpoint that others wrote: it has no manifest, so nothing can verify it."""
        if known.foreign_size is None:
            raise CheckpointNotFoundError(
                f"no checkpoint {selector.name!r} in memory or at {self._dirpath}",
                operation="restore",
                key=ids.join_url(self._dirpath, selector.name),
                hint="see `tiered-ckpt ls` for those that exist",
            )
        size, error, path = known.foreign_size, None, None
        if group.rank == 0:
            self._log.warning("%s has no manifest: it is loaded, but nothing verified it", selector.name)
        try:
            with _temporary_file(size) as (path, view):
                self._store().read_into(selector.name, 0, view)
        except TieredCheckpointError as caught:
            error = caught
        agree(group, error)
        assert path is not None
        return Restored(selector.name, None, "durable", path, time.monotonic() - started, size, [], None, None, path)


@contextlib.contextmanager
def open_restored(tier: MemoryTier, restored: Restored) -> Iterator[Path]:
    """The local file of a restored checkpoint, held while it is loaded.

    What the block maps may live on: the file is never written to again.
    """
    try:
        if restored._stored is None:
            yield restored.path
        else:
            with tier.reading(restored._stored, keep=True):
                yield restored.path
    finally:
        if restored._temporary is not None:
            # Every process of the node has it open by now, or had no need to.
            with contextlib.suppress(FileNotFoundError):
                restored._temporary.unlink()


@contextlib.contextmanager
def _temporary_file(size: int) -> Iterator[tuple[Path, memoryview]]:
    """A private file of ``size`` bytes, mapped for writing; removed if the block fails."""
    descriptor, name = tempfile.mkstemp(prefix="tiered-checkpoint-", suffix=".ckpt")
    try:
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
            mapping = mmap.mmap(descriptor, max(size, 1))
        finally:
            os.close(descriptor)
        with mapping:
            with memoryview(mapping) as view, view[:size] as part:
                yield Path(name), part
            mapping.flush()
    except OSError as error:
        os.unlink(name)
        if isinstance(error, StoreError | CheckpointNotFoundError):
            raise
        raise RestoreError(
            f"no room for {size} bytes: {error.strerror}",
            operation="restore",
            key=name,
            hint="give memory_dir, or the folder for temporary files, more space",
        ) from error
    except BaseException:
        os.unlink(name)
        raise
