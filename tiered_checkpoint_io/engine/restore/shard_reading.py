"""Opening a sharded checkpoint: discover, choose, agree on one, and hold what this node has of it.

As in ``restore``, rank 0 alone asks the durable tier what is there, and whatever fails on one rank is
carried to the next exchange of all ranks. What ``.metadata`` says reaches all ranks by such an
exchange too, so that it is read once. The tensors' bytes are read later, by each rank for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from tiered_checkpoint_io.engine.durable import fetch
from tiered_checkpoint_io.engine.ranks.coordination import Group, agree, portable, raise_first
from tiered_checkpoint_io.engine.restore.bring import Bringer
from tiered_checkpoint_io.engine.restore.choice import Held, Selector, candidates
from tiered_checkpoint_io.engine.restore.discovery import Here, Known, discover, read_more
from tiered_checkpoint_io.engine.restore.shard_choice import HeldPart, ShardCandidate, shard_candidates
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.engine.restore.shard_homing import bring_home
from tiered_checkpoint_io.engine.restore.shared_reads import clear_reads
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OtherKindError,
    RestoreError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.tier import MemoryTier, StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.hashing import chunk_size_for
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry
from tiered_checkpoint_io.stores.base import Store

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


@dataclass(slots=True)
class _Search:
    """What one call has learnt so far; the same on all ranks."""

    selector: Selector
    nodes: list[str]
    full: dict[str, list[Held]]
    memory: dict[str, list[HeldPart]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    saves: set[str] = field(default_factory=set)

    def leads(self, node: str) -> int:
        """The lowest rank of a node."""
        return self.nodes.index(node)


class ShardRestorer:
    """Opens sharded checkpoints of one durable tier, and of the memory of the nodes."""

    def __init__(
        self, config: TieredCheckpointConfig, tier: MemoryTier, store: Callable[[], Store], logger: Logger
    ) -> None:
        self._config = config
        self._tier = tier
        self._store = store
        self._log = logger
        self._bringer = Bringer(config, tier, store, logger, config.dirpath)
        #: All names on the durable tier, where this rank listed them.
        self.listed: set[str] | None = None
        self._foreign_search = _Search(Selector("name"), [], {})

    def open(self, selector: Selector, group: Group, rejected: Collection[str] = ()) -> OpenShards:
        """Chooses a checkpoint; every rank of ``group`` calls this, and all get the same, or the same error.

        Args:
            selector: What is wanted.
            group: The ranks that load together.
            rejected: Saves that this rank has found damaged.

        Raises:
            CheckpointNotFoundError: There is none.
            RestoreError: There are some, but none is intact.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            FormatVersionError: A newer release wrote what would have to be chosen.
        """
        here, failed = Here(), None
        try:
            here = self._bringer.look(group.rank)
        except Exception as error:
            failed = error
        gathered = group.all_gather((group.node, here, sorted(rejected), portable(failed, group.rank)))
        raise_first((error for _, _, _, error in gathered), failed)
        nodes: dict[str, Here] = {node: theirs for node, theirs, _, _ in reversed(gathered)}
        full = {node: theirs.held for node, theirs in nodes.items()}
        search = _Search(selector, [node for node, _, _, _ in gathered], full)
        memory = search.memory = {node: theirs.parts for node, theirs in nodes.items()}
        bad = {save_id for _, _, theirs, _ in gathered for save_id in theirs}
        search.rejected += [f"save {save_id}: damaged" for save_id in sorted(bad)]
        search.damaged = list(dict.fromkeys(n for _, h, _, _ in gathered for n in (*h.damaged, *h.quarantined)))
        search.seen = {part.content.save_id for parts in memory.values() for part in parts}
        search.seen |= {held.content.save_id for theirs in nodes.values() for held in theirs.held}
        if selector.kind != "name":
            raise_first(theirs.newer for theirs in nodes.values())
        found: Known | None = None
        if group.rank == 0:
            found = discover(self._store, selector, {})
            self.listed, found.listed = found.listed, None
        known: Known = group.broadcast(found)
        opened = self._first(known, memory, search, bad, group)
        if opened is None and selector.kind == "name" and not search.rejected:
            opened = self._foreign(known, search, group)
        if opened is None:
            raise self._none(search, group)
        if group.rank == 0:
            self._log.info("Step %d: resuming from %s", opened.step, opened.name)
        return opened

    def _first(
        self, known: Known, memory: dict[str, list[HeldPart]], search: _Search, bad: set[str], group: Group
    ) -> OpenShards | None:
        while True:
            if group.rank == 0:
                for note in known.rejected:
                    self._log.error("not restored, looking further: %s", note)
            search.rejected += known.rejected
            search.seen |= {manifest.content.save_id for manifest in known.manifests}
            options = shard_candidates(memory, known.manifests, search.selector, bad)
            if known.error is not None:
                # As in a restore: training goes on from memory while S3 is away, but never from scratch.
                if not options or not known.error.retryable:
                    raise known.error
                search.rejected.append(f"durable {self._config.dirpath}: {known.error}")
            self._check_kind(options, known, search)
            for candidate in options:
                bad.add(candidate.save_id)
                opened = self._try(candidate, search, group)
                if opened is not None:
                    return opened
            if not known.rest:
                return None
            known = group.broadcast(read_more(self._store, known) if group.rank == 0 else None)

    def _check_kind(self, options: list[ShardCandidate], known: Known, search: _Search) -> None:
        """Refuses to go back to an older sharded checkpoint where the one that is meant is a full one."""
        full = candidates(search.full, known.manifests, search.selector)
        contents = [*(each.content for each in full if each.content.kind == "full"), *(o.content for o in options)]
        for content in search.selector.in_order(contents)[:1]:
            if content.kind == "full":
                name = next(each.name for each in full if each.content.save_id == content.save_id)
                raise OtherKindError(
                    f"{name} is a full checkpoint, not a sharded one",
                    operation="restore",
                    key=ids.join_url(self._config.dirpath, name),
                    step=content.step,
                    hint="load it by TieredCheckpointIO, or name the sharded one that is meant",
                )

    # ------------------------------------------------------------------------------- one candidate
    def _try(self, candidate: ShardCandidate, search: _Search, group: Group) -> OpenShards | None:
        small: dict[str, bytes] | None = None
        for rank in sorted(search.leads(node) for node in candidate.metadata_nodes):
            small = self._share(rank, lambda: self._small_here(candidate), candidate, "memory", search, group)
            if small is not None:
                break
        if small is None and candidate.durable is not None:
            small = self._share(0, lambda: self._small_there(candidate), candidate, "durable", search, group)
        if small is None:
            return None
        if candidate.metadata_nodes:
            bring_home(group, self._tier, self._log, candidate, search.memory, search.nodes)
        files: ShardFiles | None = None
        failed: Exception | None = None
        try:
            files = self._open_files(
                candidate.save_id,
                list(candidate.durable.files) if candidate.durable else [],
                search,
                group,
                [stored for stored in self._held() if stored.save_id == candidate.save_id],
            )
        except Exception as error:
            failed = error
        try:
            agree(group, failed)
        except BaseException:
            if files is not None:
                files.close()
            raise
        newest = max(search.seen, default=None)
        content = candidate.content
        return OpenShards(
            name=candidate.name,
            save_id=candidate.save_id,
            step=content.step,
            content=content,
            small=small,
            files=files,
            rejected=search.rejected,
            newest_save_id=newest,
            scattered=bool(candidate.metadata_nodes) and len(set(search.nodes)) > 1,
        )

    def _share(
        self,
        rank: int,
        read: Callable[[], dict[str, bytes]],
        candidate: ShardCandidate,
        tier: str,
        search: _Search,
        group: Group,
    ) -> dict[str, bytes] | None:
        """What one rank reads, on all of them; None where it is damaged."""
        mine: tuple[dict[str, bytes] | None, str, TieredCheckpointError | None] | None = None
        if group.rank == rank:
            try:
                mine = (read(), "", None)
            except _DAMAGE as error:
                note = f"rank {rank}: {tier} {candidate.name} (step {candidate.content.step}): {error}"
                self._log.error("not restored, looking further: %s", note)
                mine = (None, note, None)
            except Exception as error:
                mine = (None, "", portable(error, rank))
        outcome: tuple[dict[str, bytes] | None, str, TieredCheckpointError | None]
        outcome = next(each for each in group.all_gather(mine) if each is not None)
        data, note, failed = outcome
        raise_first([failed])
        search.rejected += [note] if note else []
        return data

    def _small_here(self, candidate: ShardCandidate) -> dict[str, bytes]:
        damage: CorruptCheckpointError | None = None
        for stored in self._held():
            if stored.save_id == candidate.save_id and stored.part.commits:
                try:
                    with self._tier.reading(stored) as views:
                        found = {}
                        for entry in _small(stored.part.content.files):
                            where = str(stored.file(entry.basename))
                            fetch.verify(entry, views[entry.basename], where=where)
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

    def _small_there(self, candidate: ShardCandidate) -> dict[str, bytes]:
        assert candidate.durable is not None
        found = {}
        for entry in _small(candidate.durable.files):
            data = bytearray(entry.size)
            with memoryview(data) as view:
                fetch.fetch(self._store(), entry, view, concurrency=self._config.read_concurrency())
            found[entry.basename] = bytes(data)
        if METADATA not in found:
            raise CorruptCheckpointError("its manifest names no .metadata", operation="restore", key=candidate.name)
        return found

    def _open_files(
        self, key: str, durable: list[FileEntry], search: _Search, group: Group, parts: list[StoredPart]
    ) -> ShardFiles:
        if search.leads(group.node) == group.rank:
            clear_reads(self._tier.root)
        here = search.nodes.count(group.node)
        files = ShardFiles(
            self._tier,
            self._store,
            key,
            durable=durable,
            concurrency=max(1, self._config.read_concurrency() // here),
            timeout_s=float(self._config.wait_timeout_s),
            on_damage=self._quarantine,
        )
        for stored in parts:
            try:
                files.hold(stored)
            except CorruptCheckpointError as error:
                self._quarantine(stored, error)
            except CheckpointNotFoundError as error:
                self._log.warning("%s: %s", stored.part.name, error)
        return files

    def _quarantine(self, stored: StoredPart, error: CorruptCheckpointError) -> None:
        self._log.error("not read, looking further: %s", error)
        with suppress(OSError):
            self._tier.quarantine(stored.folder, str(error))

    # -------------------------------------------------------------------------- written by others
    def _foreign(self, known: Known, search: _Search, group: Group) -> OpenShards | None:
        """A folder that plain DCP wrote: it has no manifest, so nothing can verify it."""
        if known.error is not None:
            raise known.error
        name = search.selector.name
        candidate: tuple[bytes | None, TieredCheckpointError | None] | None = None
        if group.rank == 0:
            try:
                candidate = (self._store().get(f"{name}/{METADATA}"), None)
            except StoreNotFoundError:
                candidate = (None, None)
            except Exception as error:
                candidate = (None, portable(error, group.rank))
        shared: tuple[bytes | None, TieredCheckpointError | None] = group.broadcast(candidate)
        raise_first([shared[1]])
        if shared[0] is None:
            return None
        if group.rank == 0:
            self._log.warning("%s has no manifest: it is loaded, but nothing verified it", name)
        step = ids.step_in_name(name)
        newest = max(search.seen, default=None)
        self._foreign_search = search
        return OpenShards(name, "", -1 if step is None else step, None, {METADATA: shared[0]}, None, [], newest)

    def open_foreign(self, opened: OpenShards, sizes: dict[str, int], group: Group) -> None:
        """Opens the files of a folder that plain DCP wrote.

        Args:
            opened: From :meth:`open`.
            sizes: How many bytes of each file its ``.metadata`` names, by basename.
            group: As before.
        """
        entries = [
            FileEntry(f"{opened.name}/{basename}", size, chunk_size_for(size), ()) for basename, size in sizes.items()
        ]
        key = hashlib.sha256(ids.join_url(self._config.dirpath, opened.name).encode() + opened.metadata).hexdigest()
        opened.files = self._open_files(key[:32], entries, self._foreign_search, group, [])

    # ------------------------------------------------------------------------------------ inside
    def _held(self) -> list[StoredPart]:
        return [*self._tier.parts(), *self._tier.replicas.parts()]

    def _none(self, search: _Search, group: Group) -> TieredCheckpointError:
        selector = search.selector
        what = f"checkpoint {selector.name!r}" if selector.kind == "name" else "sharded checkpoint"
        if selector.step is not None:
            what += f" of step {selector.step}"
        if search.rejected or (search.damaged and selector.kind != "name"):
            return RestoreError(
                f"no {what} is intact: " + "; ".join(dict.fromkeys([*search.rejected, *search.damaged])),
                operation="restore",
                key=self._config.dirpath,
                rank=group.rank,
                step=selector.step,
                hint=f"corrupt parts of memory lie in {self._tier.root}/quarantine",
            )
        return CheckpointNotFoundError(
            f"no {what} in memory or at {self._config.dirpath}"
            + (f" (it may have been: {'; '.join(search.damaged)})" if search.damaged else ""),
            operation="restore",
            key=self._config.dirpath,
            rank=group.rank,
            step=selector.step,
            hint="see `tiered-ckpt ls` for those that exist",
        )


def _small(files: Iterable[FileEntry]) -> list[FileEntry]:
    """What lies beside the shards: few bytes, which every rank needs."""
    return [entry for entry in files if not entry.basename.endswith(".distcp")]
