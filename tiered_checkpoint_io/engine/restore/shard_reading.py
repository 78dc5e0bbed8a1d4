"""Opening a sharded checkpoint: all ranks agree on one, and hold what their nodes have of it.

Which one it is, rank 0 chooses for all: see ``search``. Whatever fails on one rank is carried to the next exchange of
all ranks. What ``.metadata`` says reaches all ranks by such an exchange too, so that it is read once. The tensors'
bytes are read later, by each rank for itself.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.durable.files import Files, files_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, agree, portable, raise_first
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Selector
from tiered_checkpoint_io.engine.restore.fetcher import NodeFetcher
from tiered_checkpoint_io.engine.restore.search import Search
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.engine.restore.shard_homing import restore_owners
from tiered_checkpoint_io.engine.restore.shared_reads import clear_reads
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, Content

_DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError, StoreNotFoundError)


@dataclass(slots=True)
class OpenShards:
    """A sharded checkpoint that all ranks have agreed on; held on this node until it is closed.

    Attributes:
        name: Its name.
        save_id: Which save; empty where others wrote it.
        step: Its training step; -1 where that is not known.
        content: The facts of the save; None where others wrote it.
        small: ``.metadata``, and the other files beside the shards, by name; verified where they can be.
        files: The bytes that it names; None until it is known which files others wrote.
        rejected: What was tried before it, and why it was not taken.
        newest_save_id: The newest save that was seen in any tier.
        scattered: Whether its bytes lie in the memory of several nodes.
    """

    name: str
    save_id: str
    step: int
    content: Content | None
    small: dict[str, bytes]
    files: ShardFiles | None
    rejected: list[str]
    newest_save_id: str | None
    scattered: bool = False

    @property
    def metadata(self) -> bytes:
        """The content of ``.metadata``."""
        return self.small[METADATA]

    def close(self) -> None:
        """Lets the files go."""
        if self.files is not None:
            self.files.close()


class ShardRestorer:
    """Opens sharded checkpoints of one durable tier, and of the memory of the nodes."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tier = tiers.memory
        self._nodes: list[str] = []

    def open(self, selector: Selector, group: Group, rejected: Collection[str] = ()) -> OpenShards:
        """Chooses a checkpoint; every rank of ``group`` calls this, and all get the same, or the same error.

        Args:
            selector: What is wanted.
            group: The ranks that load together.
            rejected: Saves that this rank has found damaged.

        Raises:
            CheckpointNotFoundError: There is none.
            RestoreError: There are some, but none is intact.
            OtherKindError: What is meant is no sharded checkpoint.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            FormatVersionError: A newer release wrote what would have to be chosen.
        """
        search = Search(self._tiers, NodeFetcher(self._tiers), selector, "sharded", group)
        search.look(rejected)
        self._nodes = search.nodes
        opened = search.run(lambda candidate: self._try(candidate, search, group))
        if opened is None and selector.kind == "name" and not search.rejected:
            opened = self._foreign(selector.name, group)
        if opened is None:
            raise search.nothing()
        opened.rejected, opened.newest_save_id = search.rejected, search.newest
        if group.rank == 0:
            self._tiers.log.info("Step %d: resuming from %s", opened.step, opened.name)
        return opened

    # ------------------------------------------------------------------------------- one candidate
    def _try(self, candidate: Candidate, search: Search, group: Group) -> OpenShards | None:
        small: dict[str, bytes] | None = None
        content = candidate.content
        # Read where it is needed, once: a rank that finds its bytes in memory asks the durable tier for nothing.
        there = functools.cache(lambda: files_of(self._tiers.store(), content)) if candidate.durable else None
        for rank in sorted(search.leader_of(node) for node in candidate.coordinators):
            small = self._share(rank, lambda: self._small_here(candidate), candidate, "memory", search, group)
            if small is not None:
                break
        if small is None and there is not None:
            small = self._share(0, lambda: self._small_there(candidate, there()), candidate, "durable", search, group)
        if small is None:
            return None
        if candidate.in_memory:
            restore_owners(group, self._tier, self._tiers.log, candidate, search.nodes)
        files: ShardFiles | None = None
        failed: Exception | None = None
        try:
            files = self._open_files(
                candidate.save_id,
                there,
                group,
                [stored for stored in self._tiers.held() if stored.save_id == candidate.save_id],
            )
        except Exception as error:
            failed = error
        try:
            agree(group, failed)
        except BaseException:
            if files is not None:
                files.close()
            raise
        return OpenShards(
            name=candidate.name,
            save_id=candidate.save_id,
            step=content.step,
            content=content,
            small=small,
            files=files,
            rejected=[],
            newest_save_id=None,
            scattered=candidate.in_memory and len(set(search.nodes)) > 1,
        )

    def _share(
        self,
        rank: int,
        read: Callable[[], dict[str, bytes]],
        candidate: Candidate,
        tier: str,
        search: Search,
        group: Group,
    ) -> dict[str, bytes] | None:
        """What one rank reads, on all of them; None where it is damaged."""
        mine: tuple[dict[str, bytes] | None, str, TieredCheckpointError | None] | None = None
        if group.rank == rank:
            try:
                mine = (read(), "", None)
            except _DAMAGE as error:
                note = f"rank {rank}: {tier} {candidate.name} (step {candidate.content.step}): {error}"
                self._tiers.skipped(note)
                mine = (None, note, None)
            except Exception as error:
                mine = (None, "", portable(error, rank))
        outcome: tuple[dict[str, bytes] | None, str, TieredCheckpointError | None]
        outcome = next(each for each in group.all_gather(mine) if each is not None)
        data, note, failed = outcome
        raise_first([failed])
        search.reject([note] if note else [])
        return data

    def _small_here(self, candidate: Candidate) -> dict[str, bytes]:
        damage: CorruptCheckpointError | None = None
        for stored in self._tiers.held():
            if stored.save_id == candidate.save_id and stored.part.commits:
                try:
                    with self._tier.reading(stored) as views:
                        found = {}
                        for entry in (each for each in stored.part.content.files if _is_small(each.basename)):
                            where = str(stored.file(entry.basename))
                            chunks.verify(entry, views[entry.basename], where=where)
                            found[entry.basename] = bytes(views[entry.basename])
                        return found
                except CorruptCheckpointError as error:
                    self._quarantine(stored, error)
                    damage = damage or error
        if damage is not None:
            raise damage
        raise CheckpointNotFoundError(
            "no longer in memory",
            operation="restore",
            tier="memory",
            key=candidate.save_id,
            step=candidate.content.step,
        )

    def _small_there(self, candidate: Candidate, files: Files) -> dict[str, bytes]:
        found = {}
        basenames = (path.rpartition("/")[2] for path in files.sizes)
        for entry in filter(None, map(files.entry, filter(_is_small, basenames))):
            data = bytearray(entry.size)
            with memoryview(data) as view:
                chunks.fetch(self._tiers.store(), entry, view, concurrency=self._tiers.config.read_concurrency())
            found[entry.basename] = bytes(data)
        if METADATA not in found:
            raise CorruptCheckpointError("its manifest names no .metadata", operation="restore", key=candidate.name)
        return found

    def _open_files(
        self, key: str, durable: Callable[[], Files] | None, group: Group, parts: list[StoredPart]
    ) -> ShardFiles:
        if self._nodes.index(group.node) == group.rank:
            clear_reads(self._tier.root)
        here = self._nodes.count(group.node)
        files = ShardFiles(
            self._tier,
            self._tiers.store,
            key,
            durable=durable,
            concurrency=max(1, self._tiers.config.read_concurrency() // here),
            timeout_s=float(self._tiers.config.wait_timeout_s),
            clock=self._tiers.clock,
            on_damage=self._quarantine,
        )
        for stored in parts:
            try:
                files.hold(stored)
            except CorruptCheckpointError as error:
                self._quarantine(stored, error)
            except CheckpointNotFoundError as error:
                self._tiers.log.warning("%s: %s", stored.part.name, error)
        return files

    def _quarantine(self, stored: StoredPart, error: CorruptCheckpointError) -> None:
        self._tiers.skipped(str(error))
        with suppress(OSError):
            self._tier.quarantine(stored.folder, str(error))

    # -------------------------------------------------------------------------- written by others
    def _foreign(self, name: str, group: Group) -> OpenShards | None:
        """A folder that plain DCP wrote: it has no manifest, so nothing can verify it."""
        candidate: tuple[bytes | None, TieredCheckpointError | None] | None = None
        if group.rank == 0:
            try:
                candidate = (self._tiers.store().get(f"{name}/{METADATA}"), None)
            except StoreNotFoundError:
                candidate = (None, None)
            except Exception as error:
                candidate = (None, portable(error, group.rank))
        shared: tuple[bytes | None, TieredCheckpointError | None] = group.broadcast(candidate)
        raise_first([shared[1]])
        if shared[0] is None:
            return None
        if group.rank == 0:
            self._tiers.log.warning("%s has no manifest: it is loaded, but nothing verified it", name)
        step = ids.step_in_name(name)
        return OpenShards(name, "", -1 if step is None else step, None, {METADATA: shared[0]}, None, [], None)

    def open_foreign(self, opened: OpenShards, sizes: dict[str, int], group: Group) -> None:
        """Opens the files of a folder that plain DCP wrote.

        Args:
            opened: From :meth:`open`.
            sizes: How many bytes of each file its ``.metadata`` names, by basename.
            group: As before.
        """
        key = hashlib.sha256(ids.join_url(self._tiers.dirpath, opened.name).encode() + opened.metadata).hexdigest()
        opened.files = self._open_files(key[:32], None, group, [])
        for basename, size in sizes.items():
            opened.files.adopt(chunks.unverified(f"{opened.name}/{basename}", size))


def _is_small(basename: str) -> bool:
    """Whether a file lies beside the shards: few bytes, which every rank needs."""
    return not basename.endswith(".distcp")
